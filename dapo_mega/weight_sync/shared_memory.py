"""Weights to engines on the trainer's machine through memory that both map: CUDA IPC on GPUs, /dev/shm on the CPU."""

from __future__ import annotations

import base64
import io
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import multiprocessing

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import is_local
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.errors import InputError
from dapo_mega.types import StageBucket, WeightSource
from dapo_mega.weight_sync.buckets import bucket_bytes, named_tensors
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.update import Update, UpdateCalls


class SharedMemoryTransport:
    """Implements `Transport`. A bucket's leader shares it, and rank 0 tells the engines where it lies."""

    uses_sessions = True

    def __init__(self, processes: Processes, config: WeightSyncConfig, *, fp8: bool = False) -> None:
        """Collective. `fp8`: engines take projections in FP8. Raises InputError for a trainer on several machines."""
        self._processes = processes
        self._prepare = quantised_bucket if fp8 else lambda bucket: bucket
        self._bucket_bytes = config.bucket_bytes
        if processes.device.type == "cpu":
            start_memory_manager()
        self._stage_size = processes.world_size // processes.pipeline_size
        hosts: list[Any] = [None] * processes.world_size
        dist.all_gather_object(hosts, socket.gethostname(), group=processes.control)
        if len(set(hosts)) > 1:
            raise InputError(
                f"weight_sync.transport=tensor shares the memory of one machine but the trainer runs on "
                f"{', '.join(sorted(set(hosts)))}; set weight_sync.transport to distributed or disk"
            )

    def send(self, policy: WeightSource, update: Update, session: UpdateCalls | None) -> int:
        """See `Transport`."""
        num_bytes = 0
        for bucket in map(self._prepare, policy.stage_weights(self._bucket_bytes)):
            box: list[Any] = [None]
            if bucket.pieces is not None:
                # A handle is for one reader: it counts how many have let go of the memory.
                box[0] = {target.url: [_handle(bucket) for _ in range(target.tp_size)] for target in update.targets}
            dist.broadcast_object_list(box, src=bucket.stage * self._stage_size, group=self._processes.control)
            if session:
                self._tell(session, update, bucket.is_last, box[0])
            # The memory is free for another bucket when all engines have answered.
            dist.barrier(group=self._processes.control)
            num_bytes += bucket_bytes(bucket)
        return num_bytes

    def _tell(self, session: UpdateCalls, update: Update, is_last: bool, handles: dict[str, list[str]]) -> None:
        async def load(client: EngineClient) -> None:
            if not is_local(str(urlsplit(client.url).hostname)):
                raise EngineError(
                    client.url,
                    "it runs on another machine but weight_sync.transport=tensor shares the memory of one; set "
                    "weight_sync.transport to distributed or disk",
                )
            version = update.label if is_last else None
            await client.update_weights_from_tensor(handles[client.url], version, update.flush_cache and is_last)

        session.call(load)

    def report_failure(self, url: str) -> None:
        """Nobody waits for an engine but rank 0."""

    def forget(self, urls: Sequence[str]) -> None:
        """Memory is shared for the length of a call."""

    def close(self) -> None:
        """Memory is shared for the length of a call."""


@cache
def start_memory_manager() -> None:
    """Start the process with which torch looks after memory that is shared by name.

    Engines keep it alive past the end of the trainer, and it keeps the stderr it was started with: where that is a
    pipe, whoever reads it would wait for the engines.
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


def _handle(bucket: StageBucket) -> str:
    """What SGLang rebuilds the named tensors from: a pickle that says where they lie, in base64."""
    pickled = io.BytesIO()
    with _sharing_by_name():
        ForkingPickler(pickled).dump(list(named_tensors(bucket)))
    return base64.b64encode(pickled.getvalue()).decode()


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Memory of the CPU is handed over as the name of a file: an engine is no child that inherits descriptors."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
