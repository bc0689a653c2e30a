"""Which form buckets take on their way to the engines of an update: what all of these understand."""

from __future__ import annotations

from typing import Protocol

import torch

from dapo_mega.config import WeightSyncConfig
from dapo_mega.rollout.engine import StageBucket
from dapo_mega.weight_sync.changes import ChangeFinder
from dapo_mega.weight_sync.fp8 import quantised_bucket
from dapo_mega.weight_sync.update import Update
from dapo_mega.weight_sync.wire import CHANGES_FORMAT, pieces_format


class Wire(Protocol):
    """A form of buckets."""

    takes_pieces: bool
    """Whether a bucket may be several pieces before it is prepared."""

    def prepare(self, bucket: StageBucket) -> StageBucket:
        """The bucket as it is sent."""

    def load_format(self, bucket: StageBucket) -> str:
        """What engines are told of it."""


class Wires:
    """Chooses the form, on every process the same."""

    def __init__(self, config: WeightSyncConfig, dtype: str) -> None:
        """`dtype`: what engines compute in, fp32, bf16 or fp8."""
        is_fp8 = dtype == "fp8"
        self._flat = _Flat(is_fp8)
        self._pieces = _Pieces(is_fp8)
        self._changes = _Changes()
        self._full_every = config.full_every
        self._since_full = 0

    def choose(self, update: Update) -> Wire:
        """An engine that joined or came back holds nothing that could be changed."""
        if not all(target.has_plugin for target in update.targets):
            self._since_full = self._full_every
            return self._flat
        if self._full_every == 1:
            return self._pieces
        self._since_full += 1
        if update.stale or self._since_full >= self._full_every:
            self._changes.start_over()
            self._since_full = 0
        return self._changes


class _Flat:
    """SGLang's own: one piece."""

    takes_pieces = False

    def __init__(self, is_fp8: bool) -> None:
        self._is_fp8 = is_fp8

    def prepare(self, bucket: StageBucket) -> StageBucket:
        return quantised_bucket(bucket) if self._is_fp8 else bucket

    def load_format(self, bucket: StageBucket) -> str:
        return "flattened_bucket"


class _Pieces(_Flat):
    takes_pieces = True

    def load_format(self, bucket: StageBucket) -> str:
        return pieces_format(bucket.piece_lengths)


class _Changes:
    takes_pieces = True

    def __init__(self) -> None:
        self._finder = ChangeFinder(torch.bfloat16)

    def start_over(self) -> None:
        self._finder.forget()

    def prepare(self, bucket: StageBucket) -> StageBucket:
        return self._finder.changes(bucket)

    def load_format(self, bucket: StageBucket) -> str:
        return CHANGES_FORMAT
