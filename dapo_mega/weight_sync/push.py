"""Weights of the policy to whatever generates, after every step and under a new version."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from dapo_mega.types import NamedTensors, WeightSource


class WeightSync(Protocol):
    """Brings the policy's weights to the engines. Version 0 is what a run starts from."""

    def push(self, policy: WeightSource, version: int) -> dict[str, float]:
        """Collective; returns metrics once the engines sample from the new weights."""

    def push_to_outdated(self, policy: WeightSource, version: int) -> dict[str, float]:
        """`push` to the engines that joined or came back since the last push; the others are not disturbed."""

    def close(self) -> None:
        """Free what is shared with engines."""


class _Loading(Protocol):
    def load_weights(self, buckets: Iterable[NamedTensors], version: int) -> None: ...


class EmbeddedWeightSync:
    """Implements `WeightSync` for engines in the replicas' leader processes."""

    def __init__(self, engine: _Loading, bucket_mib: float) -> None:
        self._engine = engine
        self._bucket_bytes = int(bucket_mib * 2**20)

    def push(self, policy: WeightSource, version: int) -> dict[str, float]:
        """See `WeightSync`."""
        started = time.perf_counter()
        self._engine.load_weights(policy.weights(self._bucket_bytes), version)
        return {"time/weight_sync_s": time.perf_counter() - started}

    def push_to_outdated(self, policy: WeightSource, version: int) -> dict[str, float]:
        """Embedded engines are never outdated."""
        return {}

    def close(self) -> None:
        """Nothing is shared."""
