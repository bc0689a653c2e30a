"""Delta sync: between full updates, engines get only the values that have changed in their dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import (
    PlannedBucket,
    checksum,
    differing,
    find_changes,
    pack_changes,
)
from dapo_mega.types import WeightBucket


class DeltaEncoding:
    """Remembers the weights that all engines hold and sends the changed values of a bucket.

    Used on every rank, which keeps a copy of the weights that it sends in the engines' dtype in main memory.
    `compared_bytes` and `changed_bytes` count the values that were compared with those before, and the changed ones.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype` is the engines' dtype of matrices. Vectors, which are small, are sent in their own dtype."""
        self._dtype = dtype
        self._held: dict[str, Tensor] = {}
        self.compared_bytes = self.changed_bytes = 0

    def start_over(self) -> None:
        """Assume that engines hold nothing: the next update sends everything."""
        self._held.clear()

    def planned(self, bucket: WeightBucket) -> PlannedBucket:
        """What engines are told of the bucket, whose tensors are not needed."""
        is_matrix = [spec.dtype.is_floating_point and len(spec.shape) > 1 for spec in bucket.specs]
        dtypes = [self._dtype if matrix else spec.dtype for matrix, spec in zip(is_matrix, bucket.specs, strict=True)]
        specs = tuple(replace(spec, dtype=dtype) for spec, dtype in zip(bucket.specs, dtypes, strict=True))
        return PlannedBucket(bucket.sender, specs, ())

    def encode(self, bucket: WeightBucket) -> tuple[Tensor, Tensor]:
        """The number of bytes [8] and the packed changes [bytes], uint8. Afterwards engines are assumed to hold the
        bucket."""
        found: list[tuple[Tensor | None, Tensor]] = []
        checksums = []
        for spec, (name, tensor) in zip(self.planned(bucket).specs, bucket, strict=True):
            new = tensor.to(spec.dtype).contiguous()
            held = self._held.get(name)
            before = None if held is None else held.to(new.device)
            found.append(find_changes(new, before))
            if before is not None:
                self._count(new, before, found[-1][0])
            checksums.append(checksum(new))
            if held is None:
                held = self._held[name] = torch.empty_like(new, device="cpu")
            held.copy_(new)
        packed = pack_changes(found, checksums)
        length = torch.tensor([packed.nbytes], dtype=torch.int64, device=packed.device).view(torch.uint8)
        return length, packed

    def _count(self, new: Tensor, before: Tensor, places: Tensor | None) -> None:
        """Count a compared tensor; `places` are those of its changes, None if all of its values are sent."""
        number = int(differing(new, before).sum()) if places is None else len(places)
        self.compared_bytes += new.nbytes
        self.changed_bytes += number * new.dtype.itemsize
