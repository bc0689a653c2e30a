"""Scripts on the hosts of a box, as forks of a process that has imported the package."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.distributed.launching import Fork, fork_server, run_with
from tools.cluster_in_a_box import Box


class HostFork(Fork):
    """What `Box.start` gives, sooner by what a process imports."""

    def __init__(self, process: BaseProcess, output: Path) -> None:
        super().__init__(process)
        self.output = output

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def start_on_host(
    box: Box, host: int, script: Path, arguments: Sequence[object], output: Path, variables: dict[str, str]
) -> HostFork:
    """Start `python script *arguments` on the host; it ends with it."""
    given = ({**os.environ, **variables}, str(output), str(script), list(map(str, arguments)))
    process = fork_server().Process(target=_run_inside, args=(box.first_process(host), os.getcwd(), *given))
    process.start()
    return HostFork(process, output)


def _run_inside(host: int, folder: str, *given: object) -> None:
    """Enter the namespaces of the host's first process, as nsenter does: that of processes takes effect in a fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = ("net", "uts", "pid", "mnt") if os.geteuid() == 0 else ("user", "net", "uts", "pid", "mnt")
    namespaces = [os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY) for name in names]
    for name, namespace in zip(names, namespaces, strict=True):
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"the host's {name} namespace")
    os.chdir(folder)
    process = multiprocessing.get_context("fork").Process(target=run_with, args=given)
    process.start()
    process.join()
    assert process.exitcode is not None
    if process.exitcode < 0:
        os.kill(os.getpid(), signal.Signals(-process.exitcode))
    os._exit(process.exitcode)
