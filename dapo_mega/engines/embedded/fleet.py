"""The engines inside a trainer's processes, one per data-parallel replica; rank 0 uses them like one engine.

Rank 0 collects requests, and has all of them answered when every task of its event loop waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

from dapo_mega.engines.lockstep import LockstepLoop
from dapo_mega.engines.protocol import Generation, RolloutFleet
from dapo_mega.metrics.timeline import Load, LoadHistory
from dapo_mega.types import Answer, GenerationRequest

T = TypeVar("T")


class Answering(Protocol):
    """An engine, or several that share the work. `weight_version` is that of its weights, -1 before the first."""

    @property
    def weight_version(self) -> int: ...

    def generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Answer]:
        """One answer per request, in the order given."""


class EmbeddedFleet(RolloutFleet):
    """Requests that are open at the same time are answered together, in the order in which they were asked."""

    def __init__(
        self,
        engine: Answering,
        check_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`check_stop` is called while the loop waits for what runs beside it, such as scoring, and may raise
        StopRequested."""
        self.engine = engine
        self.open: dict[int, Generation] = {}
        self._loop = LockstepLoop(self._step, check_stop)
        self._clock = clock
        self._load = LoadHistory(clock())

    def generate(self, request: GenerationRequest) -> Generation:
        """See `RolloutEngine`. Nothing is generated yet."""
        generation = self.open[request.request_id] = _Embedded(request, self._loop, self.engine)
        return generation

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.complete(work)

    def close(self) -> None:
        """Give up what was asked."""
        self._loop.shut()

    def _step(self) -> bool:
        """Answer all that was asked, in the order of the numbers: environments and scoring end in any order, and what
        is generated together is rounded together."""
        asked = [generation for generation in self.open.values() if not generation.done()]
        asked.sort(key=lambda generation: generation.request.request_id)
        self.open.clear()
        if not asked:
            return False
        self._load.change(self._clock(), len(asked))
        answers = self.engine.generate([generation.request for generation in asked])
        self._load.change(self._clock(), -len(asked))
        for generation, answer in zip(asked, answers, strict=True):
            generation.answer(answer)
        return True

    def pop_loads(self) -> Mapping[str, Sequence[Load]]:
        """See `RolloutFleet`: all engines together, which answer their requests at once."""
        return {"embedded": self._load.pop(self._clock())}


class _Embedded(Generation):
    """Its first token is sampled with the weights that the engine has when everybody waits."""

    def __init__(self, request: GenerationRequest, loop: LockstepLoop, engine: Answering) -> None:
        super().__init__(request, loop)
        self._engine = engine

    def oldest_version(self) -> int:
        return self._engine.weight_version


def split(requests: Sequence[GenerationRequest], num_parts: int) -> list[list[GenerationRequest]]:
    """Contiguous parts of about equal size; requests with one prompt stay together to share its prefill."""
    parts: list[list[GenerationRequest]] = [[] for _ in range(num_parts)]
    done = 0
    for _, members in groupby(requests, key=lambda request: request.prompt_token_ids.tobytes()):
        group = list(members)
        parts[min(done * num_parts // max(len(requests), 1), num_parts - 1)].extend(group)
        done += len(group)
    return parts
