"""One embedded engine per data-parallel replica; rank 0 uses them like one engine.

Rank 0 collects requests and generates all of them when every task of its event loop waits. The other replicas' leaders
are in `serve` and answer their share of the requests until rank 0 calls `end_serving`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch.distributed as dist

from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.engines.lockstep import LockstepLoop
from dapo_mega.engines.protocol import Generation, RolloutEngine, RolloutFleet
from dapo_mega.errors import StopRequested
from dapo_mega.metrics.timeline import Load, LoadHistory
from dapo_mega.types import Answer, GenerationRequest, NamedTensors

T = TypeVar("T")


class EmbeddedTurns(RolloutEngine):
    """Requests that are open at the same time are answered together, in the order in which they were asked."""

    def __init__(self, engine: EmbeddedEngine | None, check_stop: Callable[[], None] = lambda: None) -> None:
        """Without an engine nothing is asked here. `check_stop` is called while the loop waits for what runs beside it,
        such as scoring, and may raise StopRequested."""
        self._engine = engine
        self._asked: list[Generation] = []
        self._loop = LockstepLoop(self._step, check_stop)

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version if self._engine else -1

    def generate(self, request: GenerationRequest) -> Generation:
        """See `RolloutEngine`. Nothing is generated yet."""
        generation = _Embedded(request, self._loop, self)
        self._asked.append(generation)
        return generation

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.drive(work)

    def close(self) -> None:
        """Free the engine's memory."""
        self._loop.shut()
        if self._engine:
            self._engine.close()

    def _step(self) -> bool:
        """Answer all that was asked."""
        asked, self._asked = [generation for generation in self._asked if not generation.done()], []
        if asked:
            for generation, answer in zip(asked, self._answered([g.request for g in asked]), strict=True):
                generation.answer(answer)
        return bool(asked)

    def _answered(self, requests: Sequence[GenerationRequest]) -> Sequence[Answer]:
        """One answer per request, in the order given."""
        assert self._engine
        return self._engine.generate(requests)


class EmbeddedFleet(EmbeddedTurns, RolloutFleet):
    """Every rank constructs one and takes part in `load_weights`; rank 0 submits requests."""

    def __init__(
        self,
        processes: Processes,
        engine: EmbeddedEngine | None,
        check_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine` is this rank's engine on the replicas' leaders, None on all other ranks. `check_stop` is called
        while responses are scored and may raise StopRequested."""
        assert (engine is not None) == processes.is_leader
        super().__init__(engine, check_stop)
        self._processes = processes
        self._clock = clock
        self._load = LoadHistory(clock())

    def load_weights(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """Collective over all ranks: leaders load their engines, the other ranks only contribute shards."""
        if self._engine:
            self._engine.load_weights(buckets, version)
        else:
            for _ in buckets:
                pass

    def _answered(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Split the requests over all replicas, groups kept together. Returns answers in the order given. Rank 0 only.

        Raises StopRequested when the run is to stop.
        """
        assert self._engine
        assert self._processes.rank == 0
        self._load.change(self._clock(), len(requests))
        shares = _split(requests, self._processes.data_size)
        share = self._scatter(shares)
        gathered: list[Any] = [None] * self._processes.data_size
        dist.gather_object(self._answers(share), gathered, dst=0, group=self._processes.leaders)
        self._load.change(self._clock(), -len(requests))
        if None in gathered:
            raise StopRequested("the run was stopped while responses were generated")
        by_id = {answer.request_id: answer for answers in gathered for answer in answers}
        return [by_id[request.request_id] for request in requests]

    def serve(self) -> None:
        """Answer rank 0's requests until it calls `end_serving`. Returns at once on ranks without an engine."""
        assert self._processes.rank != 0
        if not self._engine:
            return
        while (share := self._scatter(None)) is not None:
            dist.gather_object(self._answers(share), dst=0, group=self._processes.leaders)

    def _answers(self, share: Sequence[GenerationRequest]) -> list[Answer] | None:
        """None when the run is to stop: any leader that notices tells rank 0 this way."""
        assert self._engine
        try:
            return list(self._engine.generate(share))
        except StopRequested:
            return None

    def end_serving(self) -> None:
        """Make the other leaders return from `serve`; rank 0 only."""
        self._scatter([None] * self._processes.data_size)

    def pop_loads(self) -> Mapping[str, Sequence[Load]]:
        """See `RolloutFleet`: all engines together, which answer their requests at once."""
        return {"embedded": self._load.pop(self._clock())}

    def _scatter(self, shares: list[Any] | None) -> Any:
        received: list[Any] = [None]
        dist.scatter_object_list(received, shares, src=0, group=self._processes.leaders)
        return received[0]


class _Embedded(Generation):
    """Its first token is sampled with the weights that the engine has when everybody waits."""

    def __init__(self, request: GenerationRequest, loop: LockstepLoop, turns: EmbeddedTurns) -> None:
        super().__init__(request, loop)
        self._turns = turns

    def oldest_version(self) -> int:
        return self._turns.weight_version


def _split(requests: Sequence[GenerationRequest], num_parts: int) -> list[list[GenerationRequest]]:
    """Contiguous parts of about equal size; requests with one prompt stay together to share its prefill."""
    parts: list[list[GenerationRequest]] = [[] for _ in range(num_parts)]
    done = 0
    for _, members in groupby(requests, key=lambda request: request.prompt_token_ids.tobytes()):
        group = list(members)
        parts[min(done * num_parts // max(len(requests), 1), num_parts - 1)].extend(group)
        done += len(group)
    return parts
