"""What the policy acts in, as those see it who ask for trajectories."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from dapo_mega.engines.protocol import Generation
from dapo_mega.types import GenerationFailure, GenerationRequest, Prompt, Trajectory

Generate = Callable[[GenerationRequest], Generation]
"""Start a request. It is awaited for its response, and cancelled by cancelling; see `Generation`."""


@dataclass(frozen=True)
class Begun:
    """An open trajectory of at least one turn: what is needed to go on with it, in this process or another.

    `observations` are what its environment returned, in order, that of `reset` first: as many as there are turns while
    the last turn's is awaited, else one more. `snapshot` is the environment's state after the last of them, as it wrote
    it, in base64; empty where it writes none."""

    trajectory: Trajectory
    observations: tuple[Mapping[str, Any], ...]
    snapshot: str = ""


@dataclass
class Progress:
    """How far one trajectory is; None before its first turn."""

    begun: Begun | None = None


class TrajectoryFailure(GenerationFailure):
    """An environment that failed more often than it may be tried again; never turned into a reward. `trajectory` is
    what there was until then, if the policy had a turn."""

    def __init__(self, request_id: int, reason: str, trajectory: Trajectory | None) -> None:
        super().__init__(request_id, reason)
        self.trajectory = trajectory


class Environment(Protocol):
    """A coroutine that awaits `generate` for each turn of the policy."""

    @abstractmethod
    async def run(
        self, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        """The trajectory that begins with this request, which asks the prompt, or goes on where `progress` is, and
        keeps it up to date. Raises GenerationFailure when a request or the environment fails."""

    def apart(self) -> Environment:
        """The same for trajectories that are not counted with those of this one."""
        return self

    def pop_metrics(self) -> dict[str, float]:
        """How it went since the last call, which ends a step."""
        return {}

    def log_to(self, path: Path) -> None:
        """Write what its code prints into this file from now on."""
        return

    def close(self) -> None:
        """End what it has started. May be called more than once."""
        return


class SingleTurn(Environment):
    """Question and answer: one turn, after which nothing is observed."""

    async def run(
        self, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        return Trajectory.of(await generate(request))


SINGLE_TURN: Final = SingleTurn()
