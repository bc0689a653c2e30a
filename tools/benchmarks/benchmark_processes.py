"""Starts the processes of a benchmark that talk to each other, times them together, and leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo_mega.errors import InputError


def run_processes(
    measure: Callable[..., Any],
    count: int,
    folder: Path,
    *arguments: Any,
    timeout_s: float,
    imports: Sequence[str] = (),
) -> Any:
    """What `measure(*arguments)` returns on rank 0 of `count` processes, each with one thread, in a gloo group that
    meets in `folder`. They are forks of one that `imports` modules. Raises InputError when one fails or the time is
    over."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([measure.__module__, *imports])
    results = context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(rank, count, folder, results, measure, arguments), daemon=True)
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.kill()
        worker.join()
    statuses = [worker.exitcode for worker in workers]
    if any(statuses):
        raise InputError(f"processes failed or took over {timeout_s:g} s: exit statuses {statuses}; see above")
    return results.get()


def barrier_timed(transfer: Callable[[], None], repeats: int) -> list[float]:
    """Seconds until the last process is done, per repeat, after one to warm up. A collective."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        transfer()
        dist.barrier()
        times.append(time.perf_counter() - started)
    return times[1:]


def _work(
    rank: int,
    count: int,
    folder: Path,
    results: multiprocessing.SimpleQueue[Any],
    measure: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    measured = measure(*arguments)
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()
