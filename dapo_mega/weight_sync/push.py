"""The interface with which the loop sends the policy's weights to the engines after every step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from dapo_mega.types import NamedTensors, WeightSource


class WeightSync(ABC):
    """Sends the policy's weights to the engines under a version; a run starts with version 0. The methods that are not
    abstract do nothing, which suits engines that never leave and share nothing.
    """

    @abstractmethod
    def push(self, policy: WeightSource, version: int) -> dict[str, float]:
        """Collective; returns metrics once the engines sample from the new weights."""

    def push_to_outdated(self, policy: WeightSource, version: int) -> dict[str, float]:
        """`push` to the engines that joined or came back since the last one; the others keep generating."""
        return {}

    def close(self) -> None:  # noqa: B027 (a default)
        """Free what is shared with engines."""


class _Loading(Protocol):
    def load_weights(self, buckets: Iterable[NamedTensors], version: int) -> None: ...


class EmbeddedWeightSync(WeightSync):
    """Loads weights into engines inside the replicas' leader processes."""

    def __init__(self, engine: _Loading, bucket_mib: float) -> None:
        self._engine = engine
        self._bucket_bytes = int(bucket_mib * 2**20)

    def push(self, policy: WeightSource, version: int) -> dict[str, float]:
        started = time.perf_counter()
        self._engine.load_weights(policy.weights(self._bucket_bytes), version)
        return {"time/weight_sync_s": time.perf_counter() - started}
