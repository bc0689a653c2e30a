"""Runs tests in a process of their own, which has Transformer Engine's Python on the emulated device."""

import os
import subprocess
import sys

import pytest

from tests import te_cpu

has_sources = pytest.mark.skipif(
    not (te_cpu.sources() / ".installed").is_file(),
    reason=f"no Transformer Engine in {te_cpu.sources()}: run tools/install_te_sources.sh",
)
DEVICES = ("tests/te_cpu/emulated/test_devices.py", "tests/te_cpu/emulated/test_engines.py")


def on_the_emulated_device(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `python -m pytest` with these arguments came to; it prints the device and the calls of the extension."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.te_cpu.plugin", "-p", "no:cacheprovider", *arguments],
        cwd=te_cpu.REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(te_cpu.REPOSITORY), "PYTEST_ADDOPTS": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=2400,
    )
