"""Calls a function, or runs a script, in several processes of this machine, with a deadline, and leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
}


SHARED = "DAPO_MEGA_TESTS_FORK_SERVER"
"""Environment variable with the address of the fork server of all workers."""


class Fork:
    """What callers ask of a subprocess.Popen."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a fork", timeout)
        return status

    def terminate(self) -> None:
        self._process.terminate()


class _Ports:
    """Hands out ports of this machine, none twice, and none that another process of the same suite (pytest-xdist) does.

    They lie below those that SGLang (22000 to 29999) and the system (from 32768) take for themselves, which could be a
    test's between the moment it was found free and the moment the test listens at it.
    """

    _FIRST, _NUM_PORTS, _NUM_RANGES = 10000, 3000, 4

    def __init__(self) -> None:
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        first = self._FIRST + number % self._NUM_RANGES * self._NUM_PORTS
        start = os.getpid() * 16 % self._NUM_PORTS  # Suites that run at a time begin at different places.
        self._ports = [*range(first + start, first + self._NUM_PORTS), *range(first, first + start)]

    def take(self, num_ports: int) -> int:
        """The first of consecutive free ports."""
        while len(self._ports) >= num_ports:
            taken, self._ports = self._ports[:num_ports], self._ports[num_ports:]
            if taken[-1] - taken[0] == num_ports - 1 and _are_free(taken):
                return taken[0]
        raise AssertionError("no free ports")


def _are_free(ports: Sequence[int]) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            return False
    return True


_ports = _Ports()


def free_ports(num_ports: int) -> int:
    """The first of consecutive ports at which a test may listen at any later time."""
    return _ports.take(num_ports)


def free_port() -> int:
    """A port at which a test may listen at any later time."""
    return free_ports(1)


@cache
def fork_server() -> ForkServerContext:
    """Its processes are forks of one that has imported the package, which takes longer than what most of them do: of
    the one that `share_fork_server` has started, where there is one."""
    context = multiprocessing.get_context("forkserver")
    if address := os.environ.get(SHARED):
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = lambda: None
        return context
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    with patch.dict(os.environ, _SETTINGS):
        forkserver.ensure_running()
    return context


def share_fork_server() -> None:
    """Start it for this process's children too, such as the workers of pytest; it ends with this process."""
    fork_server()
    os.environ[SHARED] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def become(variables: dict[str, str], log: str, errors: str | None = None) -> None:
    """Give this process these environment variables, and its output to a file, its errors perhaps to another."""
    with open(log, "wb") as file, open(errors, "wb") if errors else nullcontext(file) as other:
        os.dup2(file.fileno(), 1)
        os.dup2(other.fileno(), 2)
    os.environ.clear()
    os.environ.update(variables)


def run_with(variables: dict[str, str], log: str, script: str, arguments: list[str], errors: str | None = None) -> None:
    """What `python script *arguments` does with these environment variables, and its output in a file."""
    become(variables, log, errors)
    run_as_main(script, arguments)


def run_as_main(script: str, arguments: Sequence[str]) -> None:
    """What `python script *arguments` does, in this process."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _call(variables: dict[str, str], log: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call it as a member of a gloo group, and leave what it returns beside the log."""
    become(variables, log)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    result = function(*arguments)
    torch.save(result, Path(log).with_suffix(".result"))  # Twice as fast as pickle, which does each tensor by itself.
    dist.barrier()
    # Without waiting for what others never joined.
    os._exit(0)


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **_SETTINGS,
    }


def _start(target: Callable[..., None], world_size: int, log_dir: Path, *arguments: Any) -> list[BaseProcess]:
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    workers = []
    for rank in range(world_size):
        first = (environment(rank, world_size, port), str(log_dir / f"rank_{rank}.log"))
        worker = fork_server().Process(target=target, args=(*first, *arguments))
        worker.start()
        workers.append(worker)
    return workers


def start_workers(script: Path, world_size: int, arguments: Sequence[str], log_dir: Path) -> list[BaseProcess]:
    """Start the processes; what rank r prints goes to `log_dir/rank_r.log`."""
    return _start(run_with, world_size, log_dir, str(script), list(arguments))


def start_script(script: Path, arguments: Sequence[object], log: Path, errors: Path | None = None) -> BaseProcess:
    """Start `python script *arguments` outside of any group; what it prints goes to `log`, errors included unless they
    get a file of their own."""
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    given = ({**variables, **_SETTINGS}, str(log), str(script), list(map(str, arguments)))
    process = fork_server().Process(target=run_with, args=(*given, str(errors) if errors else None))
    process.start()
    return process


def run_script(
    script: Path, arguments: Sequence[object], timeout_s: float = 240, errors: Path | None = None
) -> tuple[int | None, str]:
    """Exit status of what `start_script` starts, and what it printed."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        (status,) = wait_for([start_script(script, arguments, log, errors)], timeout_s)
        return status, log.read_text()


def wait_for(workers: Sequence[BaseProcess], timeout_s: float, patience_s: float = 1.0) -> list[int | None]:
    """Exit statuses. `patience_s` after one has failed, or when time is up, the others are killed."""
    deadline = time.monotonic() + timeout_s
    while any(worker.exitcode is None for worker in workers):
        failed = any(worker.exitcode not in (None, 0) for worker in workers)
        if failed or time.monotonic() > deadline:
            for worker in workers if failed else []:
                worker.join(patience_s)
            kill(workers)
        time.sleep(0.05)
    return [worker.exitcode for worker in workers]


def kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()


def run_distributed(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 300
) -> list[Any]:
    """Call `function(*arguments)` in each of so many processes of one gloo group; what it returned, by rank.

    The function stands at the top of its test's module; arguments and results are pickled. AssertionError with every
    log, in which the traceback stands, when a process failed or time was up.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _finish(_start(_call, world_size, folder, function, arguments), folder, timeout_s)
        import torch

        return [torch.load(folder / f"rank_{rank}.result", weights_only=False) for rank in range(world_size)]


def _finish(workers: Sequence[BaseProcess], log_dir: Path, timeout_s: float) -> None:
    statuses = wait_for(workers, timeout_s)
    logs = [(log_dir / f"rank_{rank}.log").read_text() for rank in range(len(workers))]
    assert statuses == [0] * len(workers), f"exit statuses {statuses}\n" + "\n".join(
        f"--- rank {rank}\n{log[-3000:]}" for rank, log in enumerate(logs)
    )
