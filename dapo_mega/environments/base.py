"""What the policy acts in, as those see it who ask for trajectories."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Final, Protocol

from dapo_mega.engines.protocol import Generation
from dapo_mega.types import GenerationRequest, Prompt, Trajectory

Generate = Callable[[GenerationRequest], Generation]
"""Start a request. It is awaited for its response, and cancelled by cancelling; see `Generation`."""


class Environment(Protocol):
    """A coroutine that awaits `generate` for each turn of the policy."""

    @abstractmethod
    async def run(self, prompt: Prompt, request: GenerationRequest, generate: Generate) -> Trajectory:
        """The trajectory that begins with this request, which asks the prompt. Raises GenerationFailure when a request
        fails."""


class SingleTurn(Environment):
    """Question and answer: one turn, after which nothing is observed."""

    async def run(self, prompt: Prompt, request: GenerationRequest, generate: Generate) -> Trajectory:
        return Trajectory.of(await generate(request))


SINGLE_TURN: Final = SingleTurn()
