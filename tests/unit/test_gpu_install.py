"""The pinned set for GPUs fits what the project asks for; machines and arguments that do not fit are told why."""

import importlib.metadata
import os
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[2]
PINS = [
    Requirement(line)
    for line in (PROJECT / "tools" / "gpu_requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_the_pins_are_within_the_ranges_of_setup_py():
    there = {"python_version": "3.12", "extra": "gpu"}
    needs = map(Requirement, importlib.metadata.requires("dapo_mega"))
    asked = {need.name: need for need in needs if need.marker is None or need.marker.evaluate(there)}
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in PINS}
    for name in {"torch", "megatron-core", "transformers", "transformer-engine"}:
        assert asked[name].specifier.contains(pinned[name]), name
    assert all(pin.specifier.contains(pinned[pin.name]) for pin in PINS)


@pytest.mark.parametrize(
    ("python", "nvidia_smi", "nvcc", "message"),
    [
        ("exit 1", "exit 0", "echo release 13.0", "is not Python 3.12"),
        ("exit 0", "exit 9", "echo release 13.0", "nvidia-smi does not run"),
        ("exit 0", "exit 0", "echo 'Cuda, release 12.8'", "nvcc of CUDA 13 is needed to compile Transformer Engine"),
        ("exit 0", "exit 0", "exit 127", "nvcc of CUDA 13 is needed"),
    ],
)
def test_a_machine_without_what_is_needed_is_told_so_and_nothing_is_installed(
    tmp_path, python, nvidia_smi, nvcc, message
):
    for name, does in (("python3.12", python), ("nvidia-smi", nvidia_smi), ("nvcc", nvcc)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON_BASE": "python3.12"}
    environment.pop("CUDA_HOME", None)
    script = [PROJECT / "tools" / "install_gpu.sh", tmp_path / "environment"]
    result = subprocess.run(["bash", *script], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
    assert not (tmp_path / "environment").exists()


def first_hour(folder, *arguments, **variables):
    command = ["bash", PROJECT / "tools" / "gpu_first_hour.sh", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only"], "--only needs a value"),
        (["--output", "--list"], "--output needs a value"),
        (["--only", "layers,nothing"], "no step is called 'nothing'; there are: environment layers "),
        (["--only", "list"], "no step is called 'list'"),
        (["--output", "earlier", "--only", "environment"], "/earlier is not empty; give a new folder"),
        (["layers"], "unknown argument 'layers'; usage: "),
    ],
)
def test_the_first_hour_refuses_wrong_arguments_before_its_first_step(tmp_path, arguments, message):
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "layers.log").write_text("of an earlier run")
    result = first_hour(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "earlier" / "layers.log").read_text() == "of an earlier run"


def test_the_first_hour_writes_where_its_caller_says_and_lists_its_steps(tmp_path):
    listed = first_hour(tmp_path, "--list")
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert (listed.returncode, names[:2], names[-1]) == (0, ["environment", "layers"], "learn-fp8")
    assert os.listdir(tmp_path) == []
    limits = [int(line.split()[1]) for line in listed.stdout.splitlines()]
    assert sum(limits) <= 3600


def test_the_first_hour_reports_what_failed_and_what_showed_nothing(tmp_path):
    python = """#!/bin/sh
case "$*" in
    *gpu_environment*) echo this process sees no GPU; exit 2 ;;
    *test_fleet*) echo 2 skipped in 1s ;;
    *) echo 4 passed, 1 skipped in 1s ;;
esac
"""
    (tmp_path / "python").write_text(python)
    (tmp_path / "python").chmod(0o755)
    steps = ("environment", "kernels", "engines", "logprobs")
    arguments = ("--output", "mine", "--only", ",".join(steps))
    done = first_hour(tmp_path, *arguments, PYTHON=str(tmp_path / "python"))
    report = (tmp_path / "mine" / "report.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    results = ("failed (exit status 2)", "passed", "skipped", "passed")
    assert [(row[0], row[2]) for row in rows[1:]] == list(zip(steps, results, strict=True)), done.stderr
    assert "this process sees no GPU" in report
    assert done.returncode == 1
