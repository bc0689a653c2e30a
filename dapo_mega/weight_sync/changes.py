"""Delta sync: from one full update to the next, engines get only what has changed in their dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import checksum, find_changes, pack_changes
from dapo_mega.types import StageBucket
from dapo_mega.weight_sync.buckets import bucket_specs, named_tensors


class ChangeFinder:
    """Knows what all engines hold, and turns buckets into what is new in them. On every process; those that lead a
    pipeline stage keep a copy of its weights in main memory, in the engines' dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: what engines keep matrices in. Vectors, which are few, go as they are."""
        self._dtype = dtype
        self._held: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Take it that engines hold nothing: the next buckets are sent whole."""
        self._held.clear()

    def changes(self, bucket: StageBucket) -> StageBucket:
        """The bucket with its dtypes on the wire; its pieces are the number of bytes [8] and the packed changes.

        Afterwards engines count as holding it.
        """
        specs = bucket_specs(bucket)
        dtypes = [self._dtype if spec.dtype.is_floating_point and len(spec.shape) > 1 else spec.dtype for spec in specs]
        names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
        if bucket.pieces is None:
            return replace(bucket, dtypes=names)
        found, checksums = [], []
        for (name, tensor), dtype in zip(named_tensors(bucket), dtypes, strict=True):
            new = tensor.to(dtype)
            held = self._held.get(name)
            found.append(find_changes(new, None if held is None else held.to(new.device)))
            checksums.append(checksum(new))
            self._hold(name, new)
        packed = pack_changes(found, checksums)
        length = torch.tensor([packed.nbytes], dtype=torch.int64, device=packed.device).view(torch.uint8)
        return replace(bucket, dtypes=names, pieces=(length, packed))

    def _hold(self, name: str, new: Tensor) -> None:
        if name not in self._held:
            self._held[name] = torch.empty_like(new, device="cpu")
        self._held[name].copy_(new)
