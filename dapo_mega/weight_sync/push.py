"""The interface with which the loop sends the policy's weights to the engines after every step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable


class WeightSync(ABC):
    """Sends the policy's weights to the engines under a version; a run starts with version 0. On rank 0."""

    @abstractmethod
    def push(self, version: int) -> dict[str, float]:
        """Returns metrics once the engines sample from the new weights."""

    def push_to_outdated(self, version: int) -> dict[str, float]:
        """`push` to the engines that joined or came back since the last one; the others keep generating. Does nothing
        where engines never leave."""
        return {}

    def reopen(self) -> None:  # noqa: B027 (a default)
        """Another trainer sends from now on."""


class EmbeddedWeightSync(WeightSync):
    """Of engines inside the trainer's processes."""

    def __init__(self, load: Callable[[int], None]) -> None:
        """`load(version)` gives them the weights."""
        self._load = load

    def push(self, version: int) -> dict[str, float]:
        started = time.perf_counter()
        self._load(version)
        return {"time/weight_sync_s": time.perf_counter() - started}
