"""A bucket of weights as it is sent to engines: its tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_mega.types import WeightSpec


@dataclass(frozen=True)
class EncodedBucket:
    """Engines are told `specs` and `load_format`, and receive `pieces`, each [bytes] uint8 and one broadcast.

    `pieces` can be read once; it is None except on the processes that send the bucket: number `place` of the processes
    of `stage` in each replica.
    """

    stage: int
    specs: tuple[WeightSpec, ...]
    load_format: str
    pieces: Iterable[Tensor] | None
    place: int = 0


def flatten(specs: Iterable[WeightSpec], tensors: Iterable[Tensor]) -> Tensor:
    """[bytes] uint8 in new memory: the tensors one after the other, each copied as soon as `tensors` yields it."""
    flat = torch.empty(0)
    num_bytes = sum(spec.num_bytes for spec in specs)
    start = 0
    for tensor in tensors:
        if start == 0:
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
        end = start + tensor.nbytes
        flat[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start = end
    return flat
