"""A process of a run ends with its launcher, stops when told and not for longer than it may take."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dapo_mega.cli import PEER_LOST

REPOSITORY = Path(__file__).resolve().parents[3]

# Stands for torchrun: it starts processes, says their numbers, and lives until it is killed.
LAUNCHER = """
import os, subprocess, sys, time
for rank in range(2):
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "test", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    process = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], env=environment)
    print(process.pid, flush=True)
time.sleep(120)
"""
WORKER = """
import sys, time
from dapo_mega.training.process_watch import ProcessWatch
with ProcessWatch(grace_s=float(sys.argv[2])) as watch:
    if sys.argv[1] == "training":
        watch.begin_training()
    sys.stdout.write("watched\\n")  # In one piece: two processes write.
    sys.stdout.flush()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (watch.stop_requested() and sys.argv[3] == "heeds"):
        time.sleep(0.01)
    print("came to its end", flush=True)
"""


def begin(launched, *arguments):
    """A launcher with two processes, or one process alone, when they watch."""
    command = ["-c", LAUNCHER, WORKER] if launched else ["-c", WORKER]
    process = subprocess.Popen(
        [sys.executable, *command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    lines = [process.stdout.readline().strip() for _ in range(4 if launched else 1)]
    assert lines.count("watched") == (2 if launched else 1), process.stderr.read()
    return process, [psutil.Process(int(line)) for line in lines if line.isdecimal()]


@pytest.fixture
def torchrun():
    """The launcher and its processes; none of them outlives the test."""
    launcher, workers = begin(True, "training", "60", "does not heed")
    yield launcher, workers
    for process in [launcher, *workers]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    launcher.communicate(timeout=20)


def test_processes_end_when_torchrun_was_killed(torchrun):
    launcher, workers = torchrun
    launcher.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    output, errors = launcher.communicate(timeout=20)
    assert f"stopped: torchrun (process {launcher.pid}) is gone" in errors
    assert "came to its end" not in output


def test_a_signal_after_another_process_died_waits_for_no_checkpoint(torchrun):
    launcher, workers = torchrun
    workers[1].kill()
    wait_until_ended(workers[1])
    workers[0].terminate()
    wait_until_ended(workers[0])
    launcher.kill()
    output, errors = launcher.communicate(timeout=20)
    assert PEER_LOST in errors
    assert "came to its end" not in output


def wait_until_ended(process):
    deadline = time.monotonic() + 30
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("moment", "grace_s", "heed", "status", "line"),
    [
        ("training", "30", "heeds", 0, ""),
        ("SIGHUP", "30", "heeds", 0, ""),
        ("SIGUSR1", "30", "heeds", 0, ""),
        (
            "training",
            "0.5",
            "does not",
            75,
            r"stopped: the step did not end within 0.5 s after SIGTERM \(checkpoint.grace_s\).* torchrun --shutdown-t",
        ),
        ("before", "30", "heeds", 75, "stopped: the run was stopped by a signal before training began; start the same"),
    ],
)
def test_sigterm_stops_at_the_runs_own_end_or_when_time_is_up(moment, grace_s, heed, status, line):
    asked = signal.SIGTERM
    if moment.startswith("SIG"):  # Of a closed terminal, and of a scheduler.
        moment, asked = "training", signal.Signals[moment]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, as its processes do then.
    process, _ = begin(False, moment, grace_s, heed)
    signal.signal(signal.SIGHUP, before)
    process.send_signal(asked)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert re.fullmatch(f"({line}.*\n)?" if line else "", errors)
    assert ("came to its end" in output) == (status == 0)
