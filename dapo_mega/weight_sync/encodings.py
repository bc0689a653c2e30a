"""How an update's buckets are encoded: in full or, with delta sync, between full updates only the values that have
changed in the engines' dtype; in the best encoding that every participating engine can decode."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from dapo_mega.config import WeightSyncConfig
from dapo_mega.engines.sglang.weight_protocol import (
    ChunkedEncoding,
    PlannedBucket,
    checksum,
    differing,
    find_changes,
    pack_changes,
)
from dapo_mega.types import WeightBucket
from dapo_mega.weight_sync.update import Update

# A smaller broadcast takes longer than copying its tensors into one buffer with others.
_CHUNK_BYTES = 2**20


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
            places, values = find_changes(new, before)
            found.append((places, values))
            if before is not None:
                # Without places all of its values are sent, the changed ones among them.
                number = int(differing(new, before).sum()) if places is None else len(places)
                self.compared_bytes += new.nbytes
                self.changed_bytes += number * new.dtype.itemsize
            checksums.append(checksum(new))
            if held is None:
                held = self._held[name] = torch.empty_like(new, device="cpu")
            held.copy_(new)
        packed = pack_changes(found, checksums)
        length = torch.tensor([packed.nbytes], dtype=torch.int64, device=packed.device).view(torch.uint8)
        return length, packed


Encoding = ChunkedEncoding | DeltaEncoding


class Encodings:
    """Chooses an update's encoding, the same on every rank."""

    def __init__(self, config: WeightSyncConfig) -> None:
        self._flat = ChunkedEncoding(math.inf)
        self._chunked = ChunkedEncoding(_CHUNK_BYTES)
        self._delta = DeltaEncoding(torch.bfloat16)
        self._full_every = config.full_every
        self._since_full = 0

    def of(self, *, have_plugin: bool) -> Encoding:
        """The encoding for engines with or without the plugin."""
        if not have_plugin:
            return self._flat
        return self._chunked if self._full_every == 1 else self._delta

    def choose(self, update: Update, sends_to_outdated: bool) -> Encoding:
        """The encoding for all engines of the update. Engines that joined or came back need full weights from the
        processes that send to them."""
        encoding = self.of(have_plugin=update.have_plugin)
        if not update.have_plugin:
            self._since_full = self._full_every
        if encoding is not self._delta:
            return encoding
        self._since_full += 1
        is_full = self._since_full >= self._full_every
        if is_full or sends_to_outdated:
            self._delta.start_over()
        if is_full or update.outdated:
            self._since_full = 0
        return self._delta

    def take_counts(self) -> tuple[int, int]:
        """(compared, changed) bytes of delta sync on this process since the last call."""
        counts = self._delta.compared_bytes, self._delta.changed_bytes
        self._delta.compared_bytes = self._delta.changed_bytes = 0
        return counts
