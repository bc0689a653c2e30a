"""How a trajectory comes about: a coroutine that awaits `generate` for each turn of the policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from dapo_mega.engines.protocol import Generation
from dapo_mega.types import GenerationRequest, Trajectory

Generate = Callable[[GenerationRequest], Generation]
"""Start a request. It is awaited for its response, and cancelled by cancelling; see `Generation`."""


class Environment(Protocol):
    """What a policy acts in."""

    @abstractmethod
    async def run(self, request: GenerationRequest, generate: Generate) -> Trajectory:
        """The trajectory that begins with this request. Raises GenerationFailure when a request fails."""


class SingleTurn(Environment):
    """Question and answer: one turn, after which nothing is observed."""

    async def run(self, request: GenerationRequest, generate: Generate) -> Trajectory:
        """See `Environment`."""
        return Trajectory.of(await generate(request))
