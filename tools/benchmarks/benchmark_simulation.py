"""Checks `dapo-mega plan --simulate` against runs: the schedules of a real trainer on engines of a stated pace.

python tools/benchmark.py simulation
python tools/benchmark.py simulation --engines 8 --calibrate-with 4

Every run is the trainer itself with a random model, in a process of its own; its engines are scripted ones
(paced_engines.py), half of its prompts carry no signal, and its update takes at least --update-s. The first run, of the
synchronous schedule, calibrates; all rows are simulated with that alone. Takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import benchmark_workload as workload
import yaml

from dapo_mega.cli import quiet_libraries, run_command
from dapo_mega.commands import plan
from dapo_mega.config import RunConfig, load_config
from dapo_mega.metrics import read_metrics
from dapo_mega.simulation.schedules import SCHEDULES
from dapo_mega.training import loop
from dapo_mega.training.run import run_training

_COLUMNS = (
    "engines", "schedule", "max_staleness", "steps/hour", "simulated", "off by", "engines idle", "simulated",
)  # fmt: skip
_KEY = "key-of-a-benchmark"
_REWARD = '''def half(records):
    """Every second prompt has right and wrong responses, the others have only wrong ones."""
    right = [int(r["ground_truth"]) % 2 == 0 and len(r["token_ids"]) % 2 == 0 for r in records]
    return [{"score": float(is_right), "correct": is_right} for is_right in right]
'''


def run(options: argparse.Namespace) -> Iterator[str]:
    """Measure, simulate and yield the report's lines."""
    folder = options.output or Path(tempfile.mkdtemp(prefix="simulation"))
    folder.mkdir(parents=True, exist_ok=True)
    model = workload.prepare_workload(folder, options)
    (folder / "reward.py").write_text(_REWARD)
    yield (
        f"{options.places} places of {options.base_ms:g} ms + {options.per_response_ms:g} ms a response; lengths "
        f"log-normal, mean {options.mean:g}, spread {options.spread:g}, longest {options.longest}; updates "
        f"{options.update_s:g} s; {options.steps} steps of each schedule count"
    )
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    calibration: Path | None = None
    for engines in options.engines:
        measured = {}
        for schedule, staleness in SCHEDULES[: options.schedules]:
            config = _config(folder, model, options, schedule, staleness, engines)
            measured[schedule, staleness] = _measure(config, options, engines, warmup=3 + 2 * staleness)
            calibration = calibration or Path(config.output_dir)
        simulated = _simulated(folder, calibration, options, engines)
        for case, (rate, idle) in measured.items():
            found, found_idle = simulated[case]
            yield (
                f"| {engines} | {case[0]} | {case[1]} | {rate:.0f} | {found:.0f} | {found / rate - 1:+.0%} | "
                f"{idle:.0%} | {found_idle} |"
            )


def _config(
    folder: Path, model: Path, options: argparse.Namespace, schedule: str, staleness: int, engines: int
) -> RunConfig:
    given = workload.run_config(
        folder,
        model,
        options,
        rollout={
            "max_response_tokens": options.longest,
            "placement": "fleet",
            "schedule": schedule,
            "fleet": {"rendezvous": "127.0.0.1:1", "min_engines": engines, "requests_per_engine": options.places},
            "engine_tolerance": 1e9,
            "mismatch_stop": None,
            "mismatch_warning": 1e9,
        },
        reward={"function": f"{folder / 'reward.py'}:half"},
        algorithm={"preset": "dapo", "dynamic_sampling": True, "max_staleness": staleness, "max_generation_rounds": 20},
        batch={
            "groups_per_step": options.groups,
            "group_size": options.group_size,
            "generation_groups": 3 * options.groups // 2,
            "mini_batch_groups": options.groups // 2,
            "tokens_per_microbatch": 4 * (options.longest + 32),
        },
        parallel={"world_size": 1},
        weight_sync={"transport": "disk"} | ({} if schedule == "synchronous" else {"in_flight": "continue"}),
        evaluation={"every": 0},
    )
    steps = 3 + 2 * staleness + options.steps + staleness + 1
    name = f"{schedule}_{staleness}_{engines}"
    return given.model_copy(update={"output_dir": str(folder / name), "num_steps": steps})


def _measure(config: RunConfig, options: argparse.Namespace, engines: int, warmup: int) -> tuple[float, float]:
    """(steps per hour, idle share of the engines) of the run, after its first steps."""
    output = Path(config.output_dir)
    if not (output / "metrics.jsonl").is_file():
        with _engines(options, engines, config.model.path) as urls:
            values = config.model_dump(mode="json")
            values["rollout"]["fleet"] |= {"urls": urls, "rendezvous": None}
            output.mkdir(parents=True, exist_ok=True)
            (file := output.with_suffix(".yaml")).write_text(yaml.safe_dump(values))
            command = [sys.executable, __file__, "--train", str(file), "--update-s", str(options.update_s)]
            with output.with_suffix(".log").open("w") as log:
                environment = {**os.environ, "DAPO_MEGA_API_KEY": _KEY}
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True)
    records = [record for record in read_metrics(output / "metrics.jsonl") if record["step"] > 0]
    counted = records[warmup : warmup + options.steps]
    seconds = sum(record["time/step_s"] for record in counted)
    idle = sum(record["fleet/idle_share"] * record["time/step_s"] for record in counted)
    return 3600 * len(counted) / seconds, idle / seconds


@contextmanager
def _engines(options: argparse.Namespace, number: int, model: str) -> Iterator[list[str]]:
    names = ("places", "base_ms", "per_response_ms", "mean", "spread", "longest")
    given = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    vocabulary = str(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
    program = str(Path(__file__).with_name("paced_engines.py"))
    command = [sys.executable, program, "--engines", str(number), "--api-key", _KEY, *given, "--vocab-size", vocabulary]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield [server.stdout.readline().strip() for _ in range(number)]
        finally:
            server.terminate()


def _simulated(
    folder: Path, calibration: Path | None, options: argparse.Namespace, engines: int
) -> dict[tuple[str, int], tuple[float, str]]:
    """(steps per hour, idle share) of every schedule, by the command itself."""
    file = folder / f"synchronous_1_{engines}.yaml"
    arguments = [str(file), "--simulate", "--calibrate", str(calibration), "--simulated-steps", str(options.steps)]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        plan.main([*arguments, "--engine-gpus", str(engines), "--engine-tensor", "1"])
    lines = text.getvalue().splitlines()
    print(*(line for line in lines if not line.startswith("|")), sep="\n", file=sys.stderr)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {
        (row[0], int(row[1])): (3600 / float(row[3].replace(",", "")), row[rows[0].index("engines idle")])
        for row in rows[1:]
    }


def train(file: Path, update_s: float) -> None:
    """Train, and let every step's update take so long."""
    quiet_libraries()
    logging.basicConfig(level=logging.INFO)
    loop.update = _paced(loop.update, update_s)
    run_training(load_config(RunConfig, file, []))


def _paced(update: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def paced(*arguments: Any) -> Any:
        ends = time.monotonic() + seconds
        try:
            return update(*arguments)
        finally:
            time.sleep(max(0.0, ends - time.monotonic()))

    return paced


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workload.add_model_options(parser)
    workload.add_length_options(parser, mean=60, longest=256)
    parser.add_argument("--spread", type=float, default=0.9, help="standard deviation of the lengths' logarithms")
    parser.add_argument("--engines", type=int, nargs="+", default=[4], help="numbers of engines, the first calibrates")
    parser.add_argument(
        "--schedules", type=int, default=len(SCHEDULES), help="how many, synchronous first (default: all %(default)s)"
    )
    parser.add_argument("--places", type=int, default=16, help="responses that an engine decodes at once")
    parser.add_argument("--base-ms", type=float, default=10.0, help="of a decoding step")
    parser.add_argument("--per-response-ms", type=float, default=0.5, help="of a decoding step, for each response")
    parser.add_argument("--groups", type=int, default=16, help="of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--update-s", type=float, default=6.0, help="seconds that every step's update takes")
    parser.add_argument("--steps", type=int, default=12, help="of each run that count")
    parser.add_argument("--output", type=Path, help="folder of the runs; those that are there are not repeated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.train:
        train(options.train, options.update_s)
        return
    for line in run(options):
        print(line, flush=True)


if __name__ == "__main__":
    run_command(main)
