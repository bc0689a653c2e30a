"""Writes the files of Megatron's asynchronous checkpoints in a thread, from a snapshot that training cannot change.

Megatron-Core 0.16 offers processes only, and newer versions a process that writes in threads, or another package. A
process is forked from a trainer whose other threads (gloo's, autograd's) may hold locks, and outlives a killed trainer.
A thread has none of these problems, and releases the GIL while it writes. Planning and finalizing stay Megatron's. Can
go when Megatron writes without forking.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import threading
from collections.abc import MutableMapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCaller, AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket

from dapo_mega.atomic_files import checksum

# Megatron 0.17 and newer leave asynchronous writing to another package unless they are told not to.
_HAS_STRATEGIES = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
MEGATRONS_WRITER: Final = {"async_strategy": "mcore"} if _HAS_STRATEGIES else {}


class BackgroundWriting(AsyncCallsQueue):
    """Megatron's queue of asynchronous saves, executed by threads of this process."""

    def _get_async_caller(self) -> AsyncCaller:
        return _ThreadCaller()


def keep_results_in_process() -> None:
    """Give the next save its own queue for the writers' results. Megatron would start a manager process for it,
    which outlives a killed trainer."""
    filesystem_async._results_queue = queue.Queue()


def from_snapshot(request: AsyncRequest, live: Set[int], checksums: MutableMapping[str, int]) -> AsyncRequest:
    """The request with its data copied to host memory and its files written without further processes.

    When a file is on disk, its checksum is stored in `checksums` under its name. `live` has the addresses of the
    storages that hold the data. Megatron copies GPU tensors and views, but not other tensors in host memory, which
    could change before they are written.
    """
    if request.async_fn is None:
        return request
    transforms, _ = request.async_fn.args
    _, _, results = request.async_fn_args
    staged = request.preload_fn()
    snapshot = [
        (path, key, (blobs, [(item, _copied(tensor, live)) for item, tensor in tensors]))
        for path, key, (blobs, tensors) in staged
    ]
    return request._replace(
        async_fn=functools.partial(_write, transforms, snapshot, results, checksums), async_fn_args=(), preload_fn=None
    )


def _copied(tensor: torch.Tensor, live: Set[int]) -> torch.Tensor:
    return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor


def _write(
    transforms: list[Any],
    buckets: Sequence[WriteBucket],
    results: queue.Queue[Any],
    checksums: MutableMapping[str, int],
) -> None:
    """Like Megatron's own writing, one file after the other, with checksums."""
    reports: queue.Queue[Any] = queue.Queue()
    unfinished: queue.Queue[int] = queue.Queue()
    for number, bucket in enumerate(buckets):
        unfinished.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, reports, unfinished, use_fsync=True)
        file = Path(bucket[0])
        with contextlib.suppress(OSError):  # The checksum is then read from the file when the checkpoint is completed.
            checksums[file.name] = checksum(file)
    written = dict(reports.get() for _ in buckets)
    failure = next((report for report in written.values() if isinstance(report, Exception)), None)
    results.put(failure or written)


class _ThreadCaller(AsyncCaller):
    """Runs one request in a thread. It is no daemon, so a process that ends normally waits for the files."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        if async_req.async_fn is not None:
            self._thread = threading.Thread(target=async_req.async_fn, name="checkpoint-writer")
            self._thread.start()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        if blocking:
            self.close()
        is_alive = self._thread is not None and self._thread.is_alive()
        return not is_alive if no_dist else bool(self.sync_all_async_calls(int(is_alive)))

    def close(self, abort: bool = False) -> None:
        if self._thread:
            self._thread.join()

    def __del__(self) -> None:
        """Nothing to release."""
