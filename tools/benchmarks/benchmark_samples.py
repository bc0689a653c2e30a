"""Cost of writing every response of a step to `output_dir/samples`, against the step's time.

python tools/benchmark.py samples

A step is generation with the embedded engine, two updates and the weight sync, in this process. Measured apart: what
training itself does for the samples after its updates, what the thread does that makes and writes the file, and what
keeping the log-probs of every update adds to the updates, which take turns with updates that keep none.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import benchmark_workload as workload
import torch
from benchmark_step import FixedLengths
from benchmark_timing import Duration, measure, median_cpu, median_wall

from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.cli import quiet_libraries, run_command
from dapo_mega.data.tokenizer import decoder
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.training import loop
from dapo_mega.training.build import TrainingRun
from dapo_mega.training.recording import record_step
from dapo_mega.training.trainer import Updated
from dapo_mega.types import Group


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = workload.prepare_workload(folder, options)
        batch = workload.update_batch(options, num_updates=2)
        num_responses = batch["groups_per_step"] * options.group_size
        lengths = workload.response_lengths(options, num_responses, options.seed).tolist()
        config = workload.run_config(folder, model, options, batch=batch)
        with workload.built_run(config) as training_run:
            _fix_lengths(training_run, lengths)
            return _measure(training_run, lengths, options)


def _fix_lengths(training_run: TrainingRun, lengths: Sequence[int]) -> None:
    config = training_run.config
    decode = decoder(training_run.tokenizer)
    scorer = ResponseScorer(config.reward, training_run.rewards.training, decode)
    engine: Any = FixedLengths(training_run.fleet, lengths)
    training_run.collector = Collector(config, training_run.collector.prompts, engine, scorer, ())


def _measure(training_run: TrainingRun, lengths: Sequence[int], options: argparse.Namespace) -> list[str]:
    loop.open_records(training_run)
    recorder = training_run.recorder
    assert recorder
    steps: list[Duration] = []
    waits: list[Duration] = []
    files: list[Duration] = []
    updates: dict[bool, list[Duration]] = {False: [], True: []}
    training_run.weight_sync.push(0)
    started = time.perf_counter()
    for done in range(2 * options.rounds + 2):
        if done >= 8 and time.perf_counter() - started > options.limit_s:
            break
        keeps = done % 2 == 1
        groups: list[Group] = []
        before = measure(partial(_roll_out, training_run, groups))
        updated: list[Updated] = []
        after = measure(partial(_update, training_run, updated, keeps))
        training_run.step += 1
        sync = measure(partial(training_run.weight_sync.push, training_run.step))
        if done >= 2:
            updates[keeps].append(after)
            steps.append(Duration(before.wall + after.wall + sync.wall, before.cpu + after.cpu + sync.cpu))
        if keeps:
            # The thread may begin before training goes on: its time then counts there.
            wait, file = (
                measure(partial(record_step, training_run, groups, updated[0].updates)),
                measure(recorder.flush),
            )
            if done >= 2:
                waits.append(wait)
                files.append(file)
    return _report(training_run, lengths, options, steps, waits, files, updates)


def _roll_out(training_run: TrainingRun, groups: list[Group]) -> None:
    """A step up to its updates."""
    config, step = training_run.config, training_run.step
    groups += loop.collect(training_run)[0]
    training_run.trainer.take(samples_of_groups(groups, config, step))
    loop.score_groups(training_run.trainer, config, groups, step)


def _update(training_run: TrainingRun, updated: list[Updated], keeps: bool) -> None:
    updated.append(training_run.trainer.update(training_run.entropy.current(), traced=keeps))


def _report(
    training_run: TrainingRun,
    lengths: Sequence[int],
    options: argparse.Namespace,
    steps: Sequence[Duration],
    waits: Sequence[Duration],
    files: Sequence[Duration],
    updates: dict[bool, list[Duration]],
) -> list[str]:
    written = statistics.mean(
        file.stat().st_size for file in (Path(training_run.config.output_dir) / "samples").glob("step_*")
    )
    whole = median_cpu(steps)
    total = [Duration(a.wall + b.wall, a.cpu + b.cpu) for a, b in zip(waits, files, strict=True)]
    kept = median_cpu(updates[True]) - median_cpu(updates[False])
    return [
        f"{len(lengths)} responses, {sum(lengths):,} tokens, "
        f"{workload.num_parameters(Path(training_run.config.model.path)):,} parameters, {options.dtype}, "
        f"{options.threads} thread(s), medians of {len(steps)} steps; {written / 2**10:,.0f} KiB a step, "
        f"{written / sum(lengths):.1f} bytes a token",
        "| part of a step | CPU s | wall s | CPU, % of the step |",
        "|---|---|---|---|",
        f"| a step without samples | {whole:.3f} | {median_wall(steps):.3f} | 100 |",
        f"| gathering, making and writing the file | {median_cpu(total):.4f} | {median_wall(total):.4f} | "
        f"{100 * median_cpu(total) / whole:.2f} |",
        f"| of it before training goes on | {median_cpu(waits):.4f} | {median_wall(waits):.4f} | "
        f"{100 * median_cpu(waits) / whole:.2f} |",
        f"| keeping log-probs in the updates | {kept:.4f} | | {100 * kept / whole:.2f} |",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    options = workload.update_parser("samples", __doc__, responses=128).parse_args(argv)
    quiet_libraries()
    print("\n".join(run(options)))


if __name__ == "__main__":
    run_command(main)
