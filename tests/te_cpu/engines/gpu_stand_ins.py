"""Stand-ins for exactly the calls of a weight update that need a GPU: torch's CUDA IPC of storages, and NCCL's groups.

Trainer and engines both use them. All around them is what a GPU machine runs: torch's pickling and reference counts,
SGLang's unpickler, its patch of torch's reductions, its creation of process groups, its loading of weights.

An IPC handle names a file that holds the storage at some distance from its start, as a storage lies somewhere within an
allocation of CUDA. The file goes when the sender frees the storage: who opens it later finds nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions

EVENTS = "GPU_STAND_INS_EVENTS"
"""The file to which calls are added, a line of JSON each."""
_OFFSET = 1536
_HANDLE_BYTES = 64
_MEMORY = Path("/dev/shm")
_counters = itertools.count()

all_on_gpu = True
"""Whether storages without a tag of `devices.py` are on the GPU."""


def record(what: str, **details: Any) -> None:
    with open(os.environ[EVENTS], "a") as file:
        file.write(json.dumps({"what": what, **details}) + "\n")


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# CUDA IPC


def send_from_a_gpu(patch: Any) -> None:
    """In the trainer: storages say to torch's pickling that they are on GPU 0. `patch` is pytest's."""
    device_of: Any = torch.UntypedStorage.device
    files: dict[int, str] = {}

    def device(self: torch.UntypedStorage) -> torch.device:
        asking = sys._getframe(1).f_globals.get("__name__")
        is_asked = asking == reductions.__name__ and getattr(self, "is_on_gpu", all_on_gpu)
        return torch.device("cuda", 0) if is_asked else device_of.__get__(self)

    def share(self: torch.UntypedStorage) -> tuple[Any, ...]:
        """As torch's: device, handle, size, offset, file and place of the reference count, event, whether to wait."""
        address = self.data_ptr()
        if address not in files:
            name = f"gpu_stand_in_{os.getpid()}_{next(_counters)}"
            files[address] = name
            (_MEMORY / name).write_bytes(bytes(_OFFSET) + ctypes.string_at(address, self.nbytes()))
            weakref.finalize(self, _free, files, address)
        handle = files[address].encode().ljust(_HANDLE_BYTES, b"\0")
        return 0, handle, self.nbytes(), _OFFSET, b"counters", next(_counters), b"event", True

    patch.setattr(torch.UntypedStorage, "device", property(device))
    patch.setattr(torch.UntypedStorage, "_share_cuda_", share)


def _free(files: dict[int, str], address: int) -> None:
    (_MEMORY / files.pop(address)).unlink()


def _open_storage(
    device: int, handle: bytes, size: int, offset: int, counters: bytes, counter: int, event: bytes, wait: bool
) -> torch.UntypedStorage:
    assert (device, len(handle), counters) == (0, _HANDLE_BYTES, b"counters")
    with (_MEMORY / handle.rstrip(b"\0").decode()).open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    record("opened", counter=counter, bytes=size)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=offset).untyped_storage()


def _release_counter(counters: bytes, counter: int) -> None:
    record("opened", counter=counter, bytes=0)


# NCCL


class NcclStandIn(dist.ProcessGroupGloo):
    """gloo's group of the same members, which meet under the same keys of the same store."""

    class Options:
        is_high_priority_stream = True
        _timeout = timedelta(minutes=10)
        global_ranks_in_group: Any = None
        group_name = ""

    def __init__(self, store: dist.Store, rank: int, size: int, options: NcclStandIn.Options) -> None:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = options._timeout
        super().__init__(store, rank, size, gloo)
        if EVENTS in os.environ:
            record("joined", rank=rank, size=size, timeout_s=options._timeout.total_seconds())


def have_nccl(patch: Any) -> None:
    """torch was built with NCCL. What is registered for GPUs also serves the tensors here, which are in host memory."""
    register = dist.ProcessGroup._register_backend

    def register_for_both(self: Any, device: torch.device, kind: Any, backend: Any = None) -> None:
        register(self, device, kind, backend)
        if device.type == "cuda":
            register(self, torch.device("cpu"), kind, backend)

    patch.setattr(dist, "ProcessGroupNCCL", NcclStandIn, raising=False)
    patch.setattr(distributed_c10d, "ProcessGroupNCCL", NcclStandIn, raising=False)
    patch.setattr(distributed_c10d, "_NCCL_AVAILABLE", True)
    patch.setattr(dist.ProcessGroup, "_register_backend", register_for_both)


class _Forever:
    """Has of pytest's patches what `have_nccl` needs, in processes that have no pytest."""

    @staticmethod
    def setattr(target: Any, name: str, value: Any, raising: bool = True) -> None:
        setattr(target, name, value)


def receive_from_a_gpu() -> None:
    """In each process of an engine, where SGLang calls it as a plugin."""
    storage: Any = torch.UntypedStorage
    storage._new_shared_cuda = staticmethod(_open_storage)
    storage._release_ipc_counter_cuda = staticmethod(_release_counter)
    torch.cuda._lazy_init = lambda: None
    have_nccl(_Forever)
