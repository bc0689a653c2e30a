"""The ladder with real trainers: killed in the middle, continued by the same command."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dapo_mega.metrics import read_metrics
from tests.distributed.launching import run_script

from .runs import REPOSITORY, prepare, read_status

pytestmark = pytest.mark.integration


TOOL = REPOSITORY / "tools" / "ablate.py"


def arguments_of(config, output):
    rows = ["--rows", "naive_grpo", "overlong_filtering", "--seeds", "0", "--processes", "1"]
    return ["--config", str(config), "--output-dir", str(output), *rows, "num_steps=2", "evaluation.every=0"]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def kill_when(process, condition, timeout_s=240):
    """SIGKILL the command as soon as the condition holds; what it started must end too."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the moment to kill at did not come"
        assert process.poll() is None, "the command ended before it could be killed"
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"processes outlived the killed command: {alive}"
    assert children


def test_a_killed_ladder_continues_and_leaves_finished_runs_alone(tmp_path):
    config, output = prepare(tmp_path), tmp_path / "ladder of two"
    naive, filtering = (output / "ladder" / name / "seed0" for name in ("naive_grpo", "overlong_filtering"))
    given = arguments_of(config, output)
    command = [sys.executable, "-W", "ignore", str(TOOL), *given]
    with (tmp_path / "first.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        kill_when(process, (filtering / "run.lock").exists)
    assert read_status(naive)["state"] == "finished"
    assert "| Naive GRPO | 30 |" in (output / "results.md").read_text()
    finished = {path: path.stat().st_mtime_ns for path in naive.rglob("*") if path.is_file()}

    errors = tmp_path / "errors"
    status, printed = run_script(TOOL, given, errors=errors)
    assert status == 0, printed + errors.read_text()
    assert "run 1 of 2" not in printed
    assert "run 2 of 2, overlong_filtering seed 0: finished after step 2" in printed
    assert {path: path.stat().st_mtime_ns for path in naive.rglob("*") if path.is_file()} == finished
    assert [record["step"] for record in read_metrics(filtering / "metrics.jsonl")] == [0, 1, 2]
    content = json.loads((output / "results.json").read_text())
    states = [(arm["name"], [run["state"] for run in arm["runs"]]) for arm in content["arms"]]
    assert states == [("naive_grpo", ["finished"]), ("overlong_filtering", ["finished"])]
    assert content["versions"]["torch"]
    assert (output / "curves.png").is_file()

    status, _ = run_script(TOOL, [*given, "optimizer.learning_rate=0.5", "--dry-run"], errors=errors)
    assert status == 2
    begun = f"error: naive_grpo seed 0 in {naive} was begun with other settings (optimizer."
    assert errors.read_text().startswith(begun)
