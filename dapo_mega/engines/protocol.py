"""The protocols that embedded engines and a fleet of SGLang servers implement for the trainer."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from dapo_mega.metrics.timeline import Load
from dapo_mega.types import Answer, GenerationFailure, GenerationRequest, Response

T = TypeVar("T")


class Generation(asyncio.Future[Response]):
    """A request under way. Awaited it gives its response, or raises GenerationFailure; an engine never invents tokens
    for a request that it could not serve. To cancel it gives the request up."""

    def __init__(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.request = request

    @abstractmethod
    def oldest_version(self) -> int:
        """The oldest version of the weights in it: the one that sampled its first token, or that would sample it
        now."""

    def answer(self, answer: Answer) -> None:
        """End it, unless it was cancelled."""
        if self.done():
            return
        if isinstance(answer, GenerationFailure):
            self.set_exception(answer)
            self.exception()  # It is no fault if nobody waits for it any more.
        else:
            self.set_result(answer)


class RolloutEngine(Protocol):
    """Answers requests one by one as they finish; many may be in flight, also between steps.

    `generate` starts a request and returns at once; it is to be called on the engine's event loop. `open` has the
    requests without an answer, by id."""

    generate: Callable[[GenerationRequest], Generation]
    open: Mapping[int, Generation]


class ReservedEngines(RolloutEngine, Protocol):
    """`num_engines` engines that hold one version of the weights. Where they had to stop, `ended_early` says why, and
    is the reason why open and later requests fail."""

    num_engines: int
    ended_early: str


class RolloutFleet(RolloutEngine):
    """All engines of a run, on rank 0. The methods that are not abstract do nothing, as suits engines inside the
    trainer. `update_outdated`, which is to be set, sends the current weights to engines that join or come back while a
    coroutine runs."""

    update_outdated: Callable[[], object]

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that awaits `generate` to its end, on the engines' event loop. Tasks of others go on there
        meanwhile.

        Raises FleetError when lost engines do not come back in time, and StopRequested when the run is to stop; then
        `work` is cancelled.
        """

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns, called on the event loop between the steps of all tasks."""

        async def called() -> T:
            return function()

        return self.run(called())

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the engines' event loop, which goes on while the trainer trains. Engines inside the
        trainer cannot do that."""
        raise NotImplementedError

    def is_serving(self) -> bool:
        """Whether any engine that can leave has the current weights."""
        return False

    def sleep(self) -> None:
        """Free the GPU memory that colocated engines share with the policy."""

    def reserved(
        self, *, version: int, num_engines: int | None, limit_s: float
    ) -> AbstractAsyncContextManager[ReservedEngines]:
        """Let up to `num_engines` engines (None: all) that hold weights of `version` answer requests of their own for
        `limit_s` at most, wholly by these weights, while the others go on; one such call at a time. Engines inside the
        trainer or on its GPUs cannot do that."""
        raise NotImplementedError

    def pop_metrics(self) -> dict[str, float]:
        """The fleet's counters since the last call."""
        return {}

    def pop_loads(self) -> Mapping[str, Sequence[Load]]:
        """How many requests each engine has had open since the last call, by the engine's name, in seconds of the
        monotonic clock. Those of `reserved` engines do not count."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free processes, connections and memory."""
