"""Chooses how an update's buckets are encoded: the best encoding that every participating engine can decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from dapo_mega.config import WeightSyncConfig
from dapo_mega.engines.sglang.weight_protocol import PiecesFormat, split_specs
from dapo_mega.types import WeightBucket, WeightSpec
from dapo_mega.weight_sync.buckets import EncodedBucket, flatten
from dapo_mega.weight_sync.delta import DeltaEncoding
from dapo_mega.weight_sync.update import Update

# A smaller broadcast takes longer than copying its tensors into one buffer with others.
_PIECE_BYTES = 2**20


class Encoding(Protocol):
    """Turns buckets into the bytes that engines receive."""

    def encode(self, bucket: WeightBucket) -> EncodedBucket:
        """Every rank gets specs and load format; those that have the bucket's tensors also get the bytes."""


class FlatEncoding:
    """SGLang's own encoding: the whole bucket in one broadcast."""

    def encode(self, bucket: WeightBucket) -> EncodedBucket:
        pieces = None if bucket.tensors is None else (flatten(bucket.specs, bucket.tensors),)
        return EncodedBucket(bucket.stage, bucket.specs, "flattened_bucket", pieces, bucket.place)


class PiecewiseEncoding:
    """Several broadcasts per bucket: an engine loads one piece while it receives the next ones."""

    def __init__(self, window_bytes: int) -> None:
        """Engines receive at most `window_bytes` ahead of the piece that they load."""
        self._window_bytes = window_bytes

    def encode(self, bucket: WeightBucket) -> EncodedBucket:
        """See `Encoding`. Each piece is made when it is read."""
        lengths = _piece_lengths(bucket.specs)
        pieces = None if bucket.tensors is None else _pieces(split_specs(bucket.specs, lengths), bucket.tensors)
        load_format = str(PiecesFormat(lengths, self._window_bytes))
        return EncodedBucket(bucket.stage, bucket.specs, load_format, pieces, bucket.place)


def _piece_lengths(specs: Iterable[WeightSpec]) -> tuple[int, ...]:
    """The number of tensors in each piece: a large tensor is its own piece, small neighbours share one."""
    lengths: list[int] = []
    num_bytes = _PIECE_BYTES
    for spec in specs:
        if max(num_bytes, spec.num_bytes) >= _PIECE_BYTES:
            lengths.append(0)
            num_bytes = 0
        lengths[-1] += 1
        num_bytes += spec.num_bytes
    return tuple(lengths)


def _pieces(specs_of_pieces: Sequence[Sequence[WeightSpec]], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The pieces' bytes; a tensor alone in its piece is sent from its own memory, without a copy."""
    remaining = iter(tensors)
    for specs in specs_of_pieces:
        if len(specs) == 1:
            yield next(remaining).contiguous().flatten().view(torch.uint8)
        else:
            yield flatten(specs, islice(remaining, len(specs)))


class Encodings:
    """Chooses an update's encoding, the same on every rank."""

    def __init__(self, config: WeightSyncConfig) -> None:
        self._flat = FlatEncoding()
        self._piecewise = PiecewiseEncoding(config.bucket_bytes)
        self._delta = DeltaEncoding(torch.bfloat16)
        self._full_every = config.full_every
        self._since_full = 0

    def choose(self, update: Update, sends_to_outdated: bool) -> Encoding:
        """The encoding for all engines of the update. Engines that joined or came back need full weights from the
        processes that send to them."""
        if not all(target.has_plugin for target in update.targets):
            self._since_full = self._full_every
            return self._flat
        if self._full_every == 1:
            return self._piecewise
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
