"""Speed of one DAPO step, from prompts to new weights, against TRL's GRPOTrainer with the DAPO loss.

python tools/benchmark.py step --peer-python PEER/bin/python            # log-normal response lengths
python tools/benchmark.py step --peer-python PEER/bin/python --equal    # all responses as long as the longest
python tools/benchmark.py step --peer-python PEER/bin/python --model FOLDER --natural --longest 96
                                                                        # word problems, answered by a real model

The peer's environment, apart from this project's:

    python3 -m venv PEER
    PEER/bin/pip install torch==2.14.1      # the same build as here: without a GPU the CPU's
    PEER/bin/pip install trl==1.16.0

Both sides take turns, step by step, each in its own process: same model, prompts, number of responses and response
lengths, one update per step. Lengths are forced on both sides, or with --natural those of our step on the peer. Ours is
`trainer.train`: a step is all that happens from one report to the next. Ours computes in bf16, for which the CPU has
instructions, TRL in fp32, unless --dtype and --peer-dtype say otherwise.
Without --peer-python only ours is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark_workload as workload
from benchmark_timing import Duration, median_cpu, median_wall, speed_ratio

from dapo_mega.cli import quiet_libraries, run_command
from dapo_mega.data import load_tokenizer
from dapo_mega.data.tokenizer import decoder
from dapo_mega.engines.protocol import Generation, RolloutFleet
from dapo_mega.errors import InputError
from dapo_mega.metrics.jsonl import read_metrics
from dapo_mega.metrics.progress import ProgressDisplay
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.training import loop as trainer
from dapo_mega.training.build import TrainingRun
from dapo_mega.training.run_records import open_writer
from dapo_mega.types import GenerationRequest

_STAGES = ("rollout", "pack", "score", "update", "weight_sync")


class FixedLengths:
    """A fleet whose i-th response has lengths[i] tokens, whatever the model says."""

    def __init__(self, fleet: RolloutFleet, lengths: Sequence[int]) -> None:
        self._fleet = fleet
        self._lengths = lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def generate(self, request: GenerationRequest) -> Generation:
        length = self._lengths[request.request_id % len(self._lengths)]
        sampling = replace(request.sampling, max_new_tokens=length, stop_token_ids=())
        return self._fleet.generate(replace(request, sampling=sampling))


class Recorder:
    """An engine that notes how many tokens its last answers had."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Any]:
        answers: Sequence[Any] = self._engine.generate(requests)
        self.lengths = [len(answer.token_ids) for answer in answers]
        return answers


class Peer:
    """TRL in a process of its own, which does one step at a time."""

    def __init__(self, python: Path, settings: Mapping[str, Any], folder: Path) -> None:
        file = folder / "peer.json"
        file.write_text(json.dumps(settings))
        script = Path(__file__).with_name("benchmark_peer.py")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._log = (folder / "peer.log").open("w+")
        self._process = subprocess.Popen(
            [str(python), str(script), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**environment, "OMP_NUM_THREADS": str(settings["threads"])},
        )

    def step(self, lengths: Sequence[int]) -> dict[str, float]:
        """Seconds of one step with responses of `lengths`: wall, cpu, generation; and its response tokens."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(lengths)}\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("STEP "):
                report: dict[str, float] = json.loads(line.removeprefix("STEP "))
                return report
        self._log.seek(0)
        raise InputError(f"the peer ended: {(self._log.read().strip().splitlines() or ['no message'])[-1]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Turns(ProgressDisplay):
    """In place of the progress display: after each of our steps it notes the time and lets the peer do one."""

    def __init__(self, peer: Callable[[], dict[str, float]] | None, num_rounds: int, limit_s: float) -> None:
        super().__init__(num_rounds + 1, stream=sys.stderr)
        self._peer = peer
        self._num_rounds = num_rounds
        self._deadline = time.perf_counter() + limit_s
        self.ours: list[Duration] = []
        self.theirs: list[dict[str, float]] = []
        self._started = (time.perf_counter(), time.process_time())

    def update(self, step: int, metrics: Mapping[str, float], position: str = "") -> None:
        wall, cpu = self._started
        self.ours.append(Duration(time.perf_counter() - wall, time.process_time() - cpu))
        if self._peer:
            self.theirs.append(self._peer())
        enough = len(self.ours) > self._num_rounds or (len(self.ours) > 3 and time.perf_counter() > self._deadline)
        if enough:
            raise _EnoughError
        self._started = (time.perf_counter(), time.process_time())


class _EnoughError(Exception):
    """Leaves the training loop."""


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = workload.prepare_workload(folder, options)
        lengths = workload.response_lengths(options, options.prompts * options.group_size, options.seed).tolist()
        data = workload.write_word_problems(folder, options.prompts) if options.natural else {}
        config = workload.run_config(
            folder,
            model,
            options,
            **data,
            rollout={"max_response_tokens": options.longest, "dtype": options.rollout_dtype},
            reward={"overlong_punishment": False, "overlong_cache_tokens": 1, "num_workers": 1},
            batch={
                "groups_per_step": options.prompts,
                "mini_batch_groups": options.prompts,
                "group_size": options.group_size,
                "tokens_per_microbatch": max(options.microbatch_tokens, options.longest + 128),
            },
        )
        with workload.built_run(config) as training_run, contextlib.ExitStack() as stack:
            peer = None
            if options.peer_python:
                peer = Peer(options.peer_python, _peer_settings(training_run, model, options, folder), folder)
                stack.callback(peer.close)
            return _measure(training_run, peer, lengths, options)


def _peer_settings(training_run: TrainingRun, model: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    num_prompts = options.prompts * (options.rounds + 3)
    known = training_run.collector.prompts
    prompts = [known[i % len(known)] for i in range(num_prompts)]
    return {
        "model": str(model.resolve()),
        "prompts": [prompt.text for prompt in prompts],
        "answers": [prompt.ground_truth for prompt in prompts],
        "num_rows": options.prompts * options.group_size,
        "longest": options.longest,
        "group_size": options.group_size,
        "micro_rows": options.peer_micro_rows,
        "threads": options.threads,
        "dtype": options.peer_dtype,
        "output_dir": str(folder / "peer"),
    }


def _measure(
    training_run: TrainingRun, peer: Peer | None, lengths: Sequence[int], options: argparse.Namespace
) -> list[str]:
    fleet: Any = training_run.fleet
    recorder = fleet.engine = Recorder(fleet.engine)
    turns = Turns((lambda: peer.step(recorder.lengths)) if peer else None, options.rounds, options.limit_s)
    config = training_run.config
    if not options.natural:
        tokenizer = load_tokenizer(config.model.path)
        scorer = ResponseScorer(config.reward, training_run.rewards.training, decoder(tokenizer))
        forced: Any = FixedLengths(fleet, lengths)
        training_run.collector = Collector(config, training_run.collector.prompts, forced, scorer, ())
    with open_writer(config) as writer, contextlib.suppress(_EnoughError):
        training_run.progress, training_run.writer = turns, writer
        trainer.train(training_run)
    return _report(turns, read_metrics(Path(config.output_dir) / "metrics.jsonl"), options)


def _report(turns: Turns, records: Sequence[Mapping[str, float]], options: argparse.Namespace) -> list[str]:
    # The first step of each side warms up.
    ours, records = turns.ours[1:], records[1:]
    tokens = [record["rollout/tokens"] for record in records]
    stages = ", ".join(f"{stage} {statistics.median(r[f'time/{stage}_s'] for r in records):.3f}" for stage in _STAGES)
    lines = [
        f"one DAPO step: {options.prompts} x {options.group_size} responses, {statistics.median(tokens):.0f} tokens, "
        f"longest {options.longest}, {options.dtype} (engine: {options.rollout_dtype}), {options.threads} thread(s), "
        f"{len(ours)} rounds in turn, medians",
        f"ours: {median_cpu(ours):.3f} CPU s, {median_wall(ours):.3f} wall s ({stages})",
    ]
    theirs = turns.theirs[1:]
    if theirs:
        durations = [Duration(step["wall"], step["cpu"]) for step in theirs]
        ratio = speed_ratio(ours, durations)
        assert [step["tokens"] for step in theirs] == tokens
        generation = statistics.median(step["generation"] for step in theirs)
        lines += [
            f"TRL, {options.peer_dtype}: {median_cpu(durations):.3f} CPU s, {median_wall(durations):.3f} wall s (of it "
            f"generation {generation:.3f})",
            f"ours is faster by: {ratio.cpu:.2f} x CPU, {ratio.wall:.2f} x wall",
        ]
    name = "rollout/logprob_abs_diff_mean"  # Not of a step that trains on surplus alone.
    lines.append(
        "engine against trainer, mean |log-prob difference|: "
        f"{statistics.median(r[name] for r in records if name in r):.2e} nats"
    )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark.py step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", type=Path, help="python of an environment with trl; see above")
    parser.add_argument(
        "--peer-micro-rows",
        type=int,
        default=16,
        help="its micro-batch; 0: all rows at once (default: %(default)s, its fastest)",
    )
    workload.add_model_options(parser)
    workload.add_length_options(parser, mean=52, longest=256)
    parser.add_argument("--natural", action="store_true", help="word problems; the model ends its responses")
    parser.add_argument("--prompts", type=int, default=16, help="per step (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt (default: %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="ours (default: %(default)s)")
    parser.add_argument("--peer-dtype", choices=("fp32", "bf16"), default="fp32", help="TRL's (default: %(default)s)")
    parser.add_argument("--rollout-dtype", choices=("policy", "fp32", "bf16"), default="policy", help="our engine's")
    parser.add_argument("--microbatch-tokens", type=int, default=4096, help="ours (default: %(default)s)")
    workload.add_round_options(parser)
    options = parser.parse_args(argv)
    quiet_libraries()
    print("\n".join(run(options)))


if __name__ == "__main__":
    run_command(main)
