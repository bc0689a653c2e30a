"""Launchers and the engines that they start, as forks of a process that has imported SGLang, which takes longer than
what they do then. Run by SGLang's interpreter; `sglang_servers.py` asks for them.

Standard input is a socket: each byte brings a connection, which has a launcher's environment variables, log, script and
its arguments, and gets the process's id and, at its end, its exit status.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import IO, Any

from dapo_mega.distributed import programs
from dapo_mega.engines.sglang import engine_commands
from tests.distributed.launching import Fork, become, run_as_main

_IMPORTED = (
    "dapo_mega.commands.serve",
    "dapo_mega.engines.sglang.serving",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
)
_ENGINE = ["-m", "sglang.launch_server"]


def main() -> None:
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody asks for those that wait for launchers.
    with socket.socket(fileno=0) as asking:
        while True:
            byte, connections, *_ = socket.recv_fds(asking, 1, 1)
            if not byte:
                return
            with socket.socket(fileno=connections[0]) as connection:
                if os.fork() == 0:
                    asking.close()
                    _launch(connection)
                    os._exit(0)


def _launch(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = _fork(_serve, *json.loads(connection.recv(1 << 20)))
    connection.send(str(process.pid).encode())
    process.join()
    connection.send(str(process.exitcode).encode())


def _fork(target: Any, *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def _serve(variables: dict[str, str], log: str, script: str, arguments: list[str]) -> None:
    gc.enable()
    become(variables, log)
    tempfile.tempdir = None
    engine_commands.sglang_gpus = lambda python: 0  # It would ask the interpreter that this is.
    started: Any = SimpleNamespace(**{**vars(subprocess), "Popen": _started})
    programs.subprocess = started  # type: ignore[misc]
    run_as_main(script, arguments)


class _Engine(Fork):
    """The fork, which waits for a line at `stdin` as a ProcessGroup's shell does."""

    def __init__(self, process: BaseProcess, stdin: IO[bytes]) -> None:
        super().__init__(process)
        self.stdin = stdin


def _started(command: list[str], **options: Any) -> Any:
    """What a ProcessGroup gets of subprocess.Popen."""
    if command[5:7] != _ENGINE:
        return subprocess.Popen(command, **options)
    reading, writing = os.pipe()
    process = _fork(_engine, reading, command[7:], options["env"], options["stdout"].fileno(), options["pass_fds"])
    os.close(reading)
    return _Engine(process, os.fdopen(writing, "wb"))


def _engine(line: int, arguments: list[str], variables: dict[str, str], log: int, inherited: list[int]) -> None:
    os.setsid()
    os.dup2(line, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in os.listdir("/proc/self/fd"):  # Guards of other engines see the launcher's end.
        if int(name) > 2 and int(name) not in inherited:
            with contextlib.suppress(OSError):  # The listing's own is closed.
                os.close(int(name))
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [path for path in variables["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    gc.disable()  # As in sitecustomize.py.
    if os.read(0, 1):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["launch_server.py", *arguments]
        runpy.run_module(_ENGINE[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
