"""The protocols that embedded engines and a fleet of SGLang servers implement for the trainer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from dapo_mega.metrics.timeline import Load
from dapo_mega.types import Answer, GenerationRequest


class RolloutEngine(Protocol):
    """Answers requests one by one as they finish; many may be in flight, also between steps.

    Every answer to a request is either a `Response` or a `GenerationFailure`; an engine never invents tokens
    for a request it could not serve.
    """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start the requests and return at once."""

    def next_answer(self) -> Answer:
        """Wait for the next answer. Raises FleetError when lost engines do not come back in time, and StopRequested
        when the run is to stop."""

    def poll_answer(self) -> Answer | None:
        """The next answer if one is ready, else None. Does not wait."""

    def oldest_versions(self, request_ids: Sequence[int]) -> dict[int, int]:
        """The oldest weight version of each unfinished request, by id: the version that sampled its first token, or
        that would sample it now."""

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Give up requests in flight; no answer to them is needed."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Answer these requests, in the order given, whatever else is in flight."""


@dataclass(frozen=True)
class ReservedAnswers:
    """What `num_engines` reserved engines answered within `seconds`, by request id. Some answers are missing where they
    had to stop, for the reason `ended_early`; it is empty if all requests have their answers."""

    answers: Mapping[int, Answer]
    ended_early: str
    num_engines: int
    seconds: float


class RolloutFleet(RolloutEngine):
    """All engines of a run, constructed on every rank and used by rank 0. While rank 0 generates, the other ranks are
    in `serve` until rank 0 calls `end_serving`.

    The methods that are not abstract do nothing, as engines inside the trainer need.
    """

    def on_outdated_engines(self, update: Callable[[], object]) -> None:
        """Set the collective that sends the current weights to engines that join or come back during generation."""

    @abstractmethod
    def serve(self) -> None:
        """Take part in rank 0's work until it calls `end_serving`; on the other ranks only."""

    @abstractmethod
    def end_serving(self) -> None:
        """Make the other ranks return from `serve`; rank 0 only."""

    def sleep(self) -> None:
        """Free the GPU memory that colocated engines share with the policy; rank 0 only."""

    def generate_reserved(
        self, requests: Sequence[GenerationRequest], *, version: int, num_engines: int | None, limit_s: float
    ) -> Future[ReservedAnswers]:
        """Let up to `num_engines` engines (None: all) that hold weights of `version` answer these requests within
        `limit_s`, wholly by these weights, while the others go on; rank 0 only, and one such call at a time. Engines
        inside the trainer or on its GPUs cannot do that."""
        raise NotImplementedError

    def pop_metrics(self) -> dict[str, float]:
        """The fleet's counters since the last call; rank 0 only."""
        return {}

    def pop_loads(self) -> Mapping[str, Sequence[Load]]:
        """How many requests each engine has had open since the last call, by the engine's name, in seconds of the
        monotonic clock. Those of `generate_reserved` do not count; rank 0 only."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free processes, connections and memory."""
