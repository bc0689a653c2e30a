"""Which form buckets take on their way to the engines of an update: what all of these understand."""

from __future__ import annotations

from typing import Protocol

import torch

from dapo_mega.config import WeightSyncConfig
from dapo_mega.engines.sglang.weight_protocol import CHANGES_FORMAT, PiecesFormat
from dapo_mega.types import StageBucket
from dapo_mega.weight_sync.changes import ChangeFinder
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.update import Update

# How much an engine that knows where it keeps weights receives in one call, of what takes no memory of the trainer's.
_MOST_BUCKETS = 8


class Wire(Protocol):
    """A form of buckets."""

    most_bytes: int | None
    """See `WeightSource.stage_weights`."""
    num_lanes: int
    """How many of an engine's groups a bucket goes through."""

    def prepare(self, bucket: StageBucket) -> StageBucket:
        """The bucket as it is sent."""

    def load_format(self, bucket: StageBucket) -> str:
        """What engines are told of it."""


class Wires:
    """Chooses the form, on every process the same."""

    def __init__(self, config: WeightSyncConfig, dtype: str, most_lanes: int) -> None:
        """`dtype`: what engines compute in, fp32, bf16 or fp8; `most_lanes`: how many groups those with the plugin have
        of each stage."""
        is_fp8 = dtype == "fp8"
        self._flat = _Flat(is_fp8)
        self._first_pieces = _Pieces(is_fp8, config.bucket_bytes, 1, most_lanes)
        self._pieces = _Pieces(is_fp8, config.bucket_bytes, 1 if is_fp8 else _MOST_BUCKETS, most_lanes)
        self._changes = _Changes(config.bucket_bytes)
        self._full_every = config.full_every
        self._since_full = 0

    def choose(self, update: Update) -> Wire:
        """An engine that joined or came back holds nothing that could be changed."""
        if not all(target.has_plugin for target in update.targets):
            self._since_full = self._full_every
            return self._flat
        if self._full_every == 1:
            return self._first_pieces if update.stale else self._pieces
        self._since_full += 1
        if update.stale or self._since_full >= self._full_every:
            self._changes.start_over()
            self._since_full = 0
        return self._changes


class _Flat:
    """SGLang's own: one piece."""

    most_bytes: int | None = None
    num_lanes = 1

    def __init__(self, is_fp8: bool) -> None:
        self._is_fp8 = is_fp8

    def prepare(self, bucket: StageBucket) -> StageBucket:
        return quantised_bucket(bucket) if self._is_fp8 else bucket

    def load_format(self, bucket: StageBucket) -> str:
        return "flattened_bucket"


class _Pieces(_Flat):
    def __init__(self, is_fp8: bool, bucket_bytes: int, most_buckets: int, num_lanes: int) -> None:
        super().__init__(is_fp8)
        self._bucket_bytes = bucket_bytes
        self.most_bytes = most_buckets * bucket_bytes
        self.num_lanes = num_lanes

    def load_format(self, bucket: StageBucket) -> str:
        return str(PiecesFormat(bucket.piece_lengths, self._bucket_bytes, self.num_lanes))


class _Changes:
    num_lanes = 1

    def __init__(self, bucket_bytes: int) -> None:
        self.most_bytes: int | None = bucket_bytes
        self._finder = ChangeFinder(torch.bfloat16)

    def start_over(self) -> None:
        self._finder.forget()

    def prepare(self, bucket: StageBucket) -> StageBucket:
        return self._finder.changes(bucket)

    def load_format(self, bucket: StageBucket) -> str:
        return CHANGES_FORMAT
