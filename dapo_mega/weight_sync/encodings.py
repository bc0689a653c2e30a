"""Chooses how an update's buckets are encoded: the best encoding that every participating engine can decode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from dapo_mega.config import WeightSyncConfig
from dapo_mega.engines.sglang.weight_protocol import PlannedBucket, flatten, split_specs
from dapo_mega.types import WeightBucket
from dapo_mega.weight_sync.delta import DeltaEncoding
from dapo_mega.weight_sync.update import Update

# A smaller broadcast takes longer than copying its tensors into one buffer with others.
_CHUNK_BYTES = 2**20


class ChunkedEncoding:
    """A broadcast for each chunk: an engine loads one while it receives the next ones. A large tensor is its own chunk,
    small neighbours are in one together."""

    def __init__(self, chunk_bytes: float) -> None:
        """A chunk of several tensors is full at `chunk_bytes`; infinity makes one of each bucket, as SGLang expects."""
        self._chunk_bytes = chunk_bytes

    def planned(self, bucket: WeightBucket) -> PlannedBucket:
        """What engines are told of the bucket, whose tensors are not needed."""
        lengths: list[int] = []
        num_bytes = self._chunk_bytes
        for spec in bucket.specs:
            if max(num_bytes, spec.num_bytes) >= self._chunk_bytes:
                lengths.append(0)
                num_bytes = 0
            lengths[-1] += 1
            num_bytes += spec.num_bytes
        return PlannedBucket(bucket.sender, bucket.specs, tuple(lengths))

    def encode(self, bucket: WeightBucket) -> Iterator[Tensor]:
        """The bucket's chunks, each [bytes] uint8 and made when it is read; a tensor alone in one is sent from its own
        memory."""
        remaining = iter(bucket.tensors or ())
        for specs in split_specs(bucket.specs, self.planned(bucket).lengths):
            if len(specs) == 1:
                yield next(remaining).contiguous().flatten().view(torch.uint8)
            else:
                yield flatten(specs, islice(remaining, len(specs)))


Encoding = ChunkedEncoding | DeltaEncoding


class Encodings:
    """Chooses an update's encoding, the same on every rank."""

    def __init__(self, config: WeightSyncConfig) -> None:
        self._flat = ChunkedEncoding(math.inf)
        self._chunked = ChunkedEncoding(_CHUNK_BYTES)
        self._delta = DeltaEncoding(torch.bfloat16)
        self._full_every = config.full_every
        self._since_full = 0

    def choose(self, update: Update, sends_to_outdated: bool) -> Encoding:
        """The encoding for all engines of the update. Engines that joined or came back need full weights from the
        processes that send to them."""
        if not update.have_plugin:
            self._since_full = self._full_every
            return self._flat
        if self._full_every == 1:
            return self._chunked
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
