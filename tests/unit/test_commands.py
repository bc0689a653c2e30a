"""Every console command is listed, explains itself, and is the same code as its script."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo_mega.commands.main import COMMANDS, usage

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "ablate": "tools/ablate.py",
    "compare": "tools/compare.py",
    "convert": "tools/convert_checkpoint.py",
    "evaluate": "tools/evaluate.py",
    "plan": "tools/plan_run.py",
    "plot": "tools/plot_run.py",
    "prepare": "tools/prepare_data.py",
    "show-samples": "tools/show_samples.py",
    "regrade": "tools/regrade.py",
    "rejection-sample": "tools/rejection_sample.py",
    "replay-step": "tools/replay_step.py",
    "serve": "launch/serve_rollouts.py",
    "sft": "launch/train_sft.py",
    "train": "launch/train_dapo.py",
}


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [sys.executable, "-m", "dapo_mega", *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


def test_help_lists_every_command():
    modules = {path.stem.replace("_", "-") for path in (PROJECT / "dapo_mega" / "commands").glob("[!_]*.py")} - {"main"}
    assert modules == set(COMMANDS) == {*SCRIPTS, "explain", "control", "rehearse"}
    listed = [line.split()[0] for line in usage().splitlines() if line.startswith("  ")]
    assert listed[: len(COMMANDS)] == list(COMMANDS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_calls_its_command(name):
    source = (PROJECT / SCRIPTS[name]).read_text()
    assert f"from dapo_mega.commands.{name.replace('-', '_')} import main" in source
    assert source.endswith("    run_command(main)\n")  # Which makes one line and status 2 of bad input.
    assert len(source.splitlines()) < 15


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_its_arguments(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"dapo-mega {name}", "--help"])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"dapo_mega.commands.{name.replace('-', '_')}").main()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: dapo-mega {name}")


def test_a_wrong_command_is_one_line_with_the_right_ones():
    result = run("trian")
    assert result.returncode == 2
    assert result.stderr == f"error: dapo-mega has no command 'trian'; it has {', '.join(COMMANDS)}\n"


def test_processes_start_under_torchrun_and_their_error_is_one_line():
    result = run("train", "--processes", "2", "--config", "absent.yaml")
    assert result.returncode == 1
    lines = result.stderr.strip().splitlines()
    assert [line.partition(";")[0] for line in lines] == ["error: configuration file absent.yaml does not exist"]
    result = run("train", "--processes", "two")
    assert result.stderr == "error: --processes takes the number of processes, 1 or more, got 'two'\n"


WAITING = """
import os, pathlib, signal, sys, time
from dapo_mega.cli import run_command

def main():
    pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
    if os.environ["RANK"] == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)

run_command(main)
"""


@pytest.mark.parametrize(
    ("killed", "status", "said"),
    [
        (None, 128 + signal.SIGINT, r"stopped: interrupted; start the same command again to continue\n"),
        (1, 1, r"error: the process of rank 1 \(pid \d+\) was ended by SIGKILL\n"),
    ],
)
def test_processes_that_end_early_leave_one_line_and_no_report_of_torchrun(tmp_path, killed, status, said):
    (tmp_path / "waiting.py").write_text(WAITING)
    torchrun = ["-m", "dapo_mega.commands._processes", "--nproc-per-node", "2", "--rdzv-backend", "bound"]
    launcher = subprocess.Popen(
        [sys.executable, *torchrun, "--rdzv-endpoint", "127.0.0.1:0", "waiting.py", ".", str(killed)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not {"0", "1"} <= {path.name for path in tmp_path.iterdir()}:
        assert time.monotonic() < deadline, "no processes"
        time.sleep(0.05)
    if killed is None:
        os.killpg(launcher.pid, signal.SIGINT)
    printed = launcher.communicate(timeout=60)[1]
    assert (launcher.returncode, bool(re.fullmatch(said, printed))) == (status, True), printed


def test_overrides_may_stand_before_and_after_options():
    result = run("evaluate", "--config", "absent.yaml", "seed=1", "--output", "metrics.json", "model.path=absent")
    assert result.stderr.startswith("error: configuration file absent.yaml does not exist")
    for name, option in (("train", "--dry-run"), ("sft", "--accept-changes")):
        result = run(name, "--config", "absent.yaml", "seed=1", option, "model.path=absent")
        assert result.stderr.startswith("error: configuration file absent.yaml does not exist")
