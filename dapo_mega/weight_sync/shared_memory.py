"""Sends weights to engines on the same machine through shared memory: CUDA IPC on GPUs, /dev/shm on the CPU."""

from __future__ import annotations

import base64
import io
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.distributed.stores import is_local
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.weight_protocol import flatten, unpacked
from dapo_mega.errors import InputError
from dapo_mega.types import WeightBucket, WeightSource
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.update import Sent, Transport, Update, UpdateCalls


class SharedMemoryTransport(Transport):
    """Each stage's leader puts a bucket into shared memory during a call in which rank 0 tells the engines where the
    bucket is."""

    def __init__(self, processes: Processes, config: WeightSyncConfig, *, fp8: bool = False) -> None:
        """Collective. `fp8`: engines hold projections in FP8. Raises InputError for a trainer on several machines."""
        self._processes = processes
        self._is_fp8 = fp8
        self._bucket_bytes = config.bucket_bytes
        if processes.device.type == "cpu":
            start_memory_manager()
        hosts: list[Any] = [None] * processes.world_size
        dist.all_gather_object(hosts, socket.gethostname(), group=processes.control)
        if len(set(hosts)) > 1:
            raise InputError(
                f"weight_sync.transport=tensor needs one machine but the trainer runs on "
                f"{', '.join(sorted(set(hosts)))}; set weight_sync.transport to distributed or disk"
            )

    def send(self, policy: WeightSource, update: Update, session: UpdateCalls | None) -> Sent:
        num_bytes = 0
        leaders = self._processes.of_replica(0)[:: self._processes.per_stage]
        buckets = policy.weights(self._bucket_bytes, "stage_leaders", replicas=(0,))
        for bucket in map(quantised_bucket, buckets) if self._is_fp8 else buckets:
            box: list[Any] = [None]
            if bucket.tensors is not None:
                shared = _copied_together(bucket)
                # A handle is for one reader: torch counts how many have released the memory.
                box[0] = {target.url: [_handle(shared) for _ in range(target.tp_size)] for target in update.targets}
            dist.broadcast_object_list(box, src=leaders[bucket.stage], group=self._processes.control)
            if session:
                self._tell(session, update, bucket.is_last, box[0])
            # The memory may be freed when all engines have answered.
            dist.barrier(group=self._processes.control)
            num_bytes += bucket.num_bytes
        return Sent(num_bytes)

    def _tell(self, session: UpdateCalls, update: Update, is_last: bool, handles: dict[str, list[str]]) -> None:
        async def load(client: EngineClient) -> None:
            if not is_local(str(urlsplit(client.url).hostname)):
                raise EngineError(
                    client.url,
                    "it runs on another machine but weight_sync.transport=tensor needs one machine; set "
                    "weight_sync.transport to distributed or disk",
                )
            version = update.label if is_last else None
            await client.update_weights_from_tensor(handles[client.url], version, update.flush_cache and is_last)

        session.call(load)


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


def _copied_together(bucket: WeightBucket) -> list[tuple[str, Tensor]]:
    """Copies of the bucket's tensors in one new buffer, with their names. Sharing a tensor shares its whole storage,
    which may be the model's."""
    tensors = unpacked(flatten(bucket.specs, bucket.tensors or ()), bucket.specs)
    return [(spec.name, tensor) for spec, tensor in zip(bucket.specs, tensors, strict=True)]


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
