"""Writes the files of Megatron's asynchronous checkpoints in a thread, from a snapshot that training cannot change.

Megatron-Core 0.16 offers processes only: they are forked from a trainer whose other threads (gloo's, autograd's) may
hold locks at that moment, fork again for each file, and outlive a trainer that is killed. A thread has neither problem,
and while bytes move from memory to disk it does not hold Python's lock. Everything else, the plan of what each process
writes and the steps after all have written, stays Megatron's. Can go when Megatron writes without forking.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import MutableMapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCaller, AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket

from dapo_mega.files import checksum


class BackgroundWriting(AsyncCallsQueue):
    """Megatron's queue of asynchronous saves, executed by threads of this process."""

    def _get_async_caller(self) -> AsyncCaller:
        return _ThreadCaller()


def keep_results_in_process() -> None:
    """Give the next save a queue of its own for what its writers report. Megatron 0.16 would start a manager process
    for it, which outlives a killed trainer."""
    filesystem_async._results_queue = queue.Queue()


def from_snapshot(request: AsyncRequest, live: Set[int], checksums: MutableMapping[str, int]) -> AsyncRequest:
    """The request with its data copied to host memory and its files written without further processes.

    The checksum of each file goes into `checksums`, by its name, when it is on disk. `live` are the addresses of the
    storages that the data was taken from. Megatron copies what lies on a GPU or is a view; other tensors in host memory
    it would write as they are by then.
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
    """What Megatron's `write_preloaded_data_multiproc` does, one file after the other, and their checksums."""
    reports: queue.Queue[Any] = queue.Queue()
    unfinished: queue.Queue[int] = queue.Queue()
    for number, bucket in enumerate(buckets):
        unfinished.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, reports, unfinished, use_fsync=True)
        file = Path(bucket[0])
        with contextlib.suppress(OSError):  # What was written is then read when the checkpoint is completed.
            checksums[file.name] = checksum(file)
    written = dict(reports.get() for _ in buckets)
    failure = next((report for report in written.values() if isinstance(report, Exception)), None)
    results.put(failure or written)


class _ThreadCaller(AsyncCaller):
    """Runs one request. The thread is no daemon: a process that ends by itself waits for the files."""

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
