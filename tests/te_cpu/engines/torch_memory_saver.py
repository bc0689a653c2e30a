"""Stands in for the package torch_memory_saver: what was allocated under a tag is lost when that tag is paused."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from gpu_stand_ins import record
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Allocations(TorchDispatchMode):
    """Storages that operations make which do not get them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self.found[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return result


class _MemorySaver:
    enabled = True

    def __init__(self) -> None:
        self._held: dict[str, list[StorageWeakRef]] = defaultdict(list)
        self._paused: set[str] = set()

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        assert not enable_cpu_backup, "colocated engines get their weights anew"
        with _Allocations() as allocations:
            yield
        self._held[tag] += allocations.found.values()

    def pause(self, tag: str) -> None:
        assert tag not in self._paused, f"{tag} is paused already"
        self._paused.add(tag)
        num_bytes = 0
        for reference in self._held[tag]:
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                storage.fill_(0xFF)  # Not a number in all floating-point types.
                num_bytes += storage.nbytes()
        record("paused", tag=tag, bytes=num_bytes)

    def resume(self, tag: str) -> None:
        self._paused.remove(tag)
        record("resumed", tag=tag)


torch_memory_saver = _MemorySaver()


def configure_subprocess() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
