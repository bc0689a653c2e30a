"""Sends weights to engines on the same machine through shared memory: CUDA IPC on GPUs, /dev/shm on the CPU."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
from torch import Tensor, multiprocessing

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import is_local
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.weight_protocol import flatten, unpacked
from dapo_mega.errors import InputError
from dapo_mega.types import WeightSource
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.update import (
    Sent,
    SharedBucket,
    Transport,
    Update,
    UpdateCalls,
)

if TYPE_CHECKING:
    from dapo_mega.weight_sync.broadcast import WeightCommands


def refuse_several_machines(hosts: Iterable[str]) -> None:
    """Raise InputError if the trainer's processes run on several hosts, which share no memory."""
    if len(names := sorted(set(hosts))) > 1:
        raise InputError(
            f"weight_sync.transport=tensor needs one machine but the trainer runs on {', '.join(names)}; set "
            f"weight_sync.transport to disk, or to distributed for engines on GPUs of their own"
        )


class SharedMemoryTransport(Transport):
    """Tells the engines where each bucket is, while the trainer keeps it there."""

    def __init__(self, trainer: WeightCommands) -> None:
        self._trainer = trainer

    def bring(self, update: Update, calls: UpdateCalls, forgotten: Sequence[str]) -> Sent:
        num_bytes = 0
        while bucket := self._trainer.share_weights(update):
            self._tell(calls, update, bucket)
            num_bytes += bucket.num_bytes
            if bucket.is_last:
                break
        self._trainer.share_weights(None)
        return Sent(num_bytes)

    def _tell(self, calls: UpdateCalls, update: Update, bucket: SharedBucket) -> None:
        async def load(client: EngineClient) -> None:
            if not is_local(str(urlsplit(client.url).hostname)):
                raise EngineError(
                    client.url,
                    "it runs on another machine but weight_sync.transport=tensor needs one machine; set "
                    "weight_sync.transport to disk, or to distributed for engines on GPUs of their own",
                )
            await client.command(
                "update_weights_from_tensor",
                serialized_named_tensors=bucket.handles[client.url],  # One for each tensor-parallel rank.
                weight_version=update.label if bucket.is_last else None,
                flush_cache=update.flush_cache and bucket.is_last,
            )

        calls.call(load)


class SharedMemorySender:
    """Each stage's leader puts a bucket into shared memory."""

    def __init__(self, processes: Processes, config: WeightSyncConfig, *, fp8: bool = False) -> None:
        """`fp8`: engines hold projections in FP8."""
        self._is_fp8 = fp8
        self._bucket_bytes = config.bucket_bytes
        self._update = 0
        self._buckets: Iterator[SharedBucket] = iter(())
        if processes.device.type == "cpu":
            start_memory_manager()

    def share(self, policy: WeightSource, update: Update | None) -> SharedBucket | None:
        """Collective: the update's next bucket, with handles on the process that holds it; the one before is freed.
        None: all are."""
        if update is None:
            self._buckets, self._update = iter(()), 0
            return None
        if update.number != self._update:
            self._update, self._buckets = update.number, self._shared(policy, update)
        return next(self._buckets)

    def _shared(self, policy: WeightSource, update: Update) -> Iterator[SharedBucket]:
        buckets = policy.weights(self._bucket_bytes, "stage_leaders", replicas=(0,))
        for bucket in map(quantised_bucket, buckets) if self._is_fp8 else buckets:
            handles = {}
            if bucket.tensors is not None:
                # Copies in one new buffer: sharing a tensor shares its whole storage, which may be the model's.
                tensors = unpacked(flatten(bucket.specs, bucket.tensors), bucket.specs)
                shared = [(spec.name, tensor) for spec, tensor in zip(bucket.specs, tensors, strict=True)]
                # A handle is for one reader: torch counts how many have released the memory.
                handles = {target.url: [_handle(shared) for _ in range(target.tp_size)] for target in update.targets}
            yield SharedBucket(handles, bucket.num_bytes, bucket.is_last)


@cache
def start_memory_manager() -> None:
    """Start torch's shared memory manager without the trainer's stderr.

    Engines keep the manager alive after the trainer ends. If the manager held the trainer's stderr and stderr were a
    pipe, the pipe's reader would wait for the engines.
    """
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        with _sharing_by_name():
            torch.zeros(1).share_memory_()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _handle(named_tensors: list[tuple[str, Tensor]]) -> str:
    """A base64 pickle from which SGLang rebuilds the shared tensors."""
    pickled = io.BytesIO()
    with _sharing_by_name():
        ForkingPickler(pickled).dump(named_tensors)
    return base64.b64encode(pickled.getvalue()).decode()


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Share CPU memory by file name: engines are not child processes and inherit no file descriptors."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
