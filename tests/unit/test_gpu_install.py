"""The pinned set for GPUs fits what the project asks for, and a machine that cannot take it is told why at once."""

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
    asked = {need.name: need for need in map(Requirement, importlib.metadata.requires("dapo_mega"))}
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
