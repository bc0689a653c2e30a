"""Whole runs of launch/train_dapo.py on a tiny task, as separate processes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import yaml

from dapo_mega.metrics import read_metrics
from tests.distributed.launching import REPOSITORY, kill, run_script, start_script, start_workers, wait_for

TRAIN = REPOSITORY / "launch" / "train_dapo.py"
TORCHRUN = REPOSITORY / "tests" / "distributed" / "torchrun.py"


def prepare(folder: Path) -> Path:
    """A tiny arithmetic task with a random model, which has one key head that two tensor-parallel processes share;
    returns the configuration file of a run of 6 steps.

    The reward is a coin that only the request decides, so groups are mixed and dynamic sampling, buffer and
    surplus are in play although the model knows nothing.
    """
    prepare_data(
        "arithmetic", "--output", folder / "data", "--num-train", 60, "--num-eval", 8, "--num-demonstrations", 64,
        "--max-digits", 2,
    )  # fmt: skip
    prepare_data(
        "init-model", "--output", folder / "model", "--hidden-size", 32, "--layers", 2, "--intermediate-size", 48,
        "--kv-heads", 1,
    )  # fmt: skip
    config = {
        "output_dir": str(folder / "run"),
        "seed": 3,
        "num_steps": 6,
        "threads_per_process": 1,
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "max_prompt_tokens": 16,
            "train": {"path": str(folder / "data" / "train.parquet"), "template": "bare"},
            "evaluation": {"path": str(folder / "data" / "eval.parquet"), "template": "bare"},
        },
        "rollout": {"max_response_tokens": 12},
        "reward": {"source": "random", "overlong_cache_tokens": 4},
        "algorithm": {"preset": "dapo", "max_staleness": 2},
        "batch": {
            "groups_per_step": 6,
            "group_size": 4,
            "generation_groups": 8,
            "mini_batch_groups": 3,
            "tokens_per_microbatch": 128,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3},
        "evaluation": {"at_start": True, "every": 3, "samples_per_prompt": 2, "top_p": 1.0},
        "checkpoint": {"every": 2, "keep_last": 2},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def prepare_data(*arguments: object) -> None:
    """tools/prepare_data.py with these arguments."""
    status, output = run_script(REPOSITORY / "tools" / "prepare_data.py", arguments)
    assert status == 0, output


def start(config: Path, world_size: int, output_dir: Path, *overrides: str, script: Path = TRAIN) -> list[BaseProcess]:
    arguments = ["--config", str(config), f"output_dir={output_dir}", *overrides]
    return start_workers(script, world_size, arguments, output_dir.parent / f"{output_dir.name}_logs")


def finish(workers: list[BaseProcess], output_dir: Path, timeout_s: float = 240) -> None:
    statuses = wait_for(workers, timeout_s)
    logs = output_dir.parent / f"{output_dir.name}_logs"
    assert statuses == [0] * len(workers), "\n".join(log.read_text()[-3000:] for log in sorted(logs.glob("*.log")))


def kill_when(workers: list[BaseProcess], condition: Callable[[], bool], timeout_s: float = 240) -> None:
    """SIGKILL every process as soon as the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the moment to kill at did not come"
        assert all(worker.exitcode is None for worker in workers), "the run ended before it could be killed"
        time.sleep(0.002)
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)  # The moment stays while its children are looked for.
    children = [child for worker in workers for child in psutil.Process(worker.pid).children(recursive=True)]
    kill(workers)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"processes outlived the killed trainer: {alive}"


def run_that_starts_again(script: Path, *arguments: object, limit_s: float = 240) -> str:
    """What two processes print that torchrun may start again once; they must come to their end."""
    torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with tempfile.TemporaryDirectory() as folder:
        process = start_script(TORCHRUN, [*torchrun, script, *arguments], log := Path(folder) / "log")
        try:
            process.join(limit_s)
        finally:
            process.terminate()  # torchrun ends its processes.
            process.join()
        assert process.exitcode == 0, log.read_text()[-3000:]
        return log.read_text()


def read_status(output_dir: Path) -> dict[str, Any]:
    """status.json of a run."""
    status: dict[str, Any] = json.loads((output_dir / "status.json").read_text())
    return status


def steps_done(output_dir: Path) -> int:
    file = output_dir / "metrics.jsonl"
    records = read_metrics(file) if file.is_file() else []
    return int(records[-1]["step"]) if records else -1


def decisive(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics that a second run must reproduce: all but times, speeds and what a fleet of engines was seen doing."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "fleet/")) and "per_s" not in name
    }
