"""The protocols between the trainer and whatever generates: embedded engines or a fleet of SGLang servers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from dapo_mega.types import Answer, GenerationRequest


class RolloutEngine(Protocol):
    """Answers requests one by one as they finish; many may be in flight, also between steps.

    Every answer to a request is either a `Response` or a `GenerationFailure`; an engine never invents tokens
    for a request it could not serve.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take the requests on and return at once."""

    def next_answer(self) -> Answer:
        """Wait for the next finished request. Raises FleetError when the engines do not come back in time, and
        StopRequested when the run is to stop."""

    def poll_answer(self) -> Answer | None:
        """A finished request that `next_answer` would give without waiting; None when there is none."""

    def oldest_versions(self, request_ids: Sequence[int]) -> dict[int, int]:
        """The oldest weights that have a part in each request, by id: those that sampled its first token, or, while it
        has none, those that it would begin with now. Requests that have ended are left out."""

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Give up requests in flight; they need not be answered any more."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Answer these requests, in the order given, whatever else is in flight."""


class RolloutFleet(RolloutEngine):
    """All engines of a run, constructed on every process and driven by rank 0. What is not abstract here does nothing:
    right for engines that live inside the trainer.

    While rank 0 generates the other processes are in `serve`, until rank 0 calls `end_serving`.
    """

    def on_outdated_engines(self, update: Callable[[], object]) -> None:
        """Say what brings the current weights to engines that join or come back meanwhile: a collective."""

    @abstractmethod
    def serve(self) -> None:
        """Work for rank 0 until it calls `end_serving`; on the other processes only."""

    @abstractmethod
    def end_serving(self) -> None:
        """Send the other processes on; rank 0 only."""

    def sleep(self) -> None:
        """Free the memory that the policy needs to train, where engines and policy share it; rank 0 only."""

    def pop_metrics(self) -> dict[str, float]:
        """The fleet's counters since the last call; rank 0 only."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of processes, connections and memory."""
