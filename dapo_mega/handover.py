"""Hands a step's samples from rank 0 to every process as flat tensors, not pickles."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist

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


def broadcast_error(message: str | None, group: dist.ProcessGroup) -> str | None:
    """Rank 0's error message, or None, on every process: so that all leave together."""
    box = [message]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]
