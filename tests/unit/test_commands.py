"""Every console command is listed, explains itself, and is the same code as its script."""

import importlib
import os
import subprocess
import sys
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
    assert modules == set(COMMANDS) == set(SCRIPTS)
    listed = [line.split()[0] for line in usage().splitlines() if line.startswith("  ")]
    assert listed[: len(COMMANDS)] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_calls_its_command(name):
    source = (PROJECT / SCRIPTS[name]).read_text()
    assert f"from dapo_mega.commands.{name.replace('-', '_')} import main" in source
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


def test_processes_start_under_torchrun_and_their_error_stands_last():
    result = run("train", "--processes", "2", "--config", "absent.yaml")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: configuration file absent.yaml does not exist")
    assert "OMP_NUM_THREADS" not in result.stderr
    result = run("train", "--processes", "two")
    assert result.stderr == "error: --processes takes the number of processes, 1 or more, got 'two'\n"


def test_overrides_may_stand_before_and_after_options():
    result = run("evaluate", "--config", "absent.yaml", "seed=1", "--output", "metrics.json", "model.path=absent")
    assert result.stderr.startswith("error: configuration file absent.yaml does not exist")
    for name, option in (("train", "--dry-run"), ("sft", "--accept-changes")):
        result = run(name, "--config", "absent.yaml", "seed=1", option, "model.path=absent")
        assert result.stderr.startswith("error: configuration file absent.yaml does not exist")
