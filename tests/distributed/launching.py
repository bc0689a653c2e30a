"""Starts a worker script as several gloo processes on this machine, with a deadline, and never leaves one behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class _Ports:
    """Hands out ports of this machine, none twice.

    They lie below those that the system gives to connections of its own, one of which could take a port between the
    moment it was found free and the moment a test listens at it.
    """

    _FIRST, _LAST = 20000, 32000

    def __init__(self) -> None:
        self._next = self._FIRST + os.getpid() % 500 * 16

    def take(self, num_ports: int) -> int:
        """The first of consecutive free ports."""
        for _ in range(self._LAST - self._FIRST):
            first, self._next = self._next, self._next + num_ports
            if self._next > self._LAST:
                self._next = self._FIRST
            elif _are_free(range(first, first + num_ports)):
                return first
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


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(REPOSITORY),
    }


def start_workers(script: Path, world_size: int, arguments: Sequence[str], log_dir: Path) -> list[subprocess.Popen]:
    """Start the processes; what rank r prints goes to `log_dir/rank_r.log`."""
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    workers = []
    for rank in range(world_size):
        with (log_dir / f"rank_{rank}.log").open("w") as log:
            workers.append(
                subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    env=environment(rank, world_size, port),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return workers


def wait_for(workers: Sequence[subprocess.Popen], timeout_s: float) -> list[int]:
    """Exit statuses. When one fails, or time is up, the others are killed."""
    deadline = time.monotonic() + timeout_s
    while any(worker.poll() is None for worker in workers):
        failed = any(worker.poll() not in (None, 0) for worker in workers)
        if failed or time.monotonic() > deadline:
            time.sleep(1.0 if failed else 0.0)
            kill(workers)
        time.sleep(0.05)
    return [worker.wait() for worker in workers]


def kill(workers: Sequence[subprocess.Popen]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
    for worker in workers:
        worker.wait()


def run_workers(script: Path, world_size: int, arguments: Sequence[str], log_dir: Path, timeout_s: float = 300) -> str:
    """Run to the end and return what rank 0 printed; AssertionError with every log when a process failed."""
    statuses = wait_for(start_workers(script, world_size, arguments, log_dir), timeout_s)
    logs = {rank: (log_dir / f"rank_{rank}.log").read_text() for rank in range(world_size)}
    assert statuses == [0] * world_size, f"exit statuses {statuses}\n" + "\n".join(
        f"--- rank {rank}\n{log[-3000:]}" for rank, log in logs.items()
    )
    return logs[0]
