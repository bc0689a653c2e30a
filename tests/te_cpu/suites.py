"""Runs tests in processes of their own, which have Transformer Engine's Python on the emulated device."""

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests import te_cpu
from tests.distributed.launching import SHARED, become, wait_for

has_sources = pytest.mark.skipif(
    not (te_cpu.sources() / ".installed").is_file(),
    reason=f"no Transformer Engine in {te_cpu.sources()}: run tools/install_te_sources.sh",
)
_VARIABLES = {te_cpu.VARIABLE: "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(te_cpu.REPOSITORY)}
DEVICES = ("tests/te_cpu/emulated/test_devices.py", "tests/te_cpu/emulated/test_engines.py")


@functools.cache
def _with_the_emulated_device() -> forkserver.ForkServer:
    """Starts forks of a process that has imported the package and has the emulated device."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.distributed.preloaded"])
    with patch.dict(os.environ, {**_VARIABLES, "OMP_NUM_THREADS": "1"}):
        server.ensure_running()
    return server


def _test(variables: dict[str, str], log: str, arguments: list[str]) -> None:
    become(variables, log)
    os.chdir(te_cpu.REPOSITORY)
    sys.exit(pytest.main(arguments))


def on_the_emulated_device(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `pytest` with these arguments came to; it prints the device and the calls of the extension. It is a process
    of its own, as are those that its tests fork: forks of one that has the device."""
    server: Any = _with_the_emulated_device()
    variables = {**os.environ, **_VARIABLES, SHARED: server._forkserver_address, "PYTEST_ADDOPTS": ""}
    command = ["-q", "-p", "tests.te_cpu.plugin", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = multiprocessing.get_context("forkserver").Process(target=_test, args=(variables, str(log), command))
        with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            process.start()
        (status,) = wait_for([process], timeout_s=2400)
        assert status is not None
        return subprocess.CompletedProcess(command, status, log.read_text(), "")
