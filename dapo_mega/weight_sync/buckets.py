"""What a stage's bucket consists of."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dapo_mega.rollout.engine import StageBucket


def tensor_sizes(bucket: StageBucket) -> list[int]:
    """Bytes of each tensor, known on every process."""
    return [
        math.prod(shape) * dtype_named(dtype).itemsize
        for shape, dtype in zip(bucket.shapes, bucket.dtypes, strict=True)
    ]


def named_tensors(bucket: StageBucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors as views of the data, where these are."""
    assert bucket.data is not None
    pieces = bucket.data.split(tensor_sizes(bucket))
    for name, dtype, shape, piece in zip(bucket.names, bucket.dtypes, bucket.shapes, pieces, strict=True):
        yield name, piece.view(dtype_named(dtype)).view(shape)


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
