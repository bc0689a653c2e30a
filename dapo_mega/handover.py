"""Hands a step's samples from rank 0 to every process as flat tensors, not pickles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist

from dapo_mega.errors import InputError, StarvedError
from dapo_mega.packing import SampleColumns

_DTYPES = (np.int32, np.int64, np.int64, np.float32, np.uint8, np.uint8, np.float32)


def broadcast_columns(columns: SampleColumns | None, group: dist.ProcessGroup) -> SampleColumns:
    """The columns that rank 0 gives, on every process of `group`; the others pass None."""
    names = [field.name for field in fields(SampleColumns)]
    sizes = torch.zeros(len(names), dtype=torch.int64)
    if columns is not None:
        sizes = torch.tensor([len(vars(columns)[name]) for name in names])
    dist.broadcast(sizes, src=0, group=group)
    received = {}
    for name, size, dtype in zip(names, sizes.tolist(), _DTYPES, strict=True):
        array = np.empty(size, dtype=dtype) if columns is None else np.ascontiguousarray(vars(columns)[name], dtype)
        dist.broadcast(torch.from_numpy(array), src=0, group=group)
        received[name] = array
    return SampleColumns(**received)


@contextlib.contextmanager
def leaving_together(group: dist.ProcessGroup) -> Iterator[None]:
    """Run a block that may find bad input on some processes only: afterwards either all go on, or all raise the
    first error found. The block itself must not need the other processes."""
    error: Exception | None = None
    try:
        yield
    except (InputError, StarvedError, OSError) as caught:
        error = caught
    found: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, error, group=group)
    first = next((e for e in found if e is not None), None)
    if first is not None:
        raise first
