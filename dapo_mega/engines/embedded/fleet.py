"""One embedded engine per data-parallel replica; rank 0 uses them like one engine.

Rank 0 collects the submitted requests and generates all of them when it waits for the first answer. The other replicas'
leaders are in `serve` and answer their share of the requests until rank 0 calls `end_serving`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch.distributed as dist

from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.engines.protocol import RolloutFleet
from dapo_mega.errors import StopRequested
from dapo_mega.metrics.timeline import Load, LoadHistory
from dapo_mega.types import Answer, GenerationRequest, NamedTensors


class EmbeddedFleet(RolloutFleet):
    """Every rank constructs one and takes part in `load_weights`; rank 0 submits requests."""

    def __init__(
        self, processes: Processes, engine: EmbeddedEngine | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`engine` is this rank's engine on the replicas' leaders, None on all other ranks."""
        assert (engine is not None) == processes.is_leader
        self._processes = processes
        self._engine = engine
        self._submitted: dict[int, GenerationRequest] = {}
        self._answered: deque[Answer] = deque()
        self._clock = clock
        self._load = LoadHistory(clock())

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version if self._engine else -1

    def load_weights(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """Collective over all ranks: leaders load their engines, the other ranks only contribute shards."""
        if self._engine:
            self._engine.load_weights(buckets, version)
        else:
            for _ in buckets:
                pass

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `RolloutEngine`. Nothing is generated yet."""
        self._submitted.update((request.request_id, request) for request in requests)

    def next_answer(self) -> Answer:
        """See `RolloutEngine`. When no answer is left, generates all submitted requests."""
        if not self._answered:
            assert self._submitted, "nothing was asked"
            requests, self._submitted = list(self._submitted.values()), {}
            self._answered.extend(self.generate(requests))
        return self._answered.popleft()

    def poll_answer(self) -> Answer | None:
        """See `RolloutEngine`."""
        return self._answered.popleft() if self._answered else None

    def oldest_versions(self, request_ids: Sequence[int]) -> dict[int, int]:
        """See `RolloutEngine`."""
        return {request_id: self.weight_version for request_id in request_ids if request_id in self._submitted}

    def cancel(self, request_ids: Sequence[int]) -> None:
        """See `RolloutEngine`."""
        for request_id in request_ids:
            self._submitted.pop(request_id, None)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
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

    def close(self) -> None:
        """Free the engine's memory."""
        if self._engine:
            self._engine.close()

    def _scatter(self, shares: list[Any] | None) -> Any:
        received: list[Any] = [None]
        dist.scatter_object_list(received, shares, src=0, group=self._processes.leaders)
        return received[0]


def _split(requests: Sequence[GenerationRequest], num_parts: int) -> list[list[GenerationRequest]]:
    """Contiguous parts of about equal size; requests with one prompt stay together to share its prefill."""
    parts: list[list[GenerationRequest]] = [[] for _ in range(num_parts)]
    done = 0
    for _, members in groupby(requests, key=lambda request: request.prompt_token_ids.tobytes()):
        group = list(members)
        parts[min(done * num_parts // max(len(requests), 1), num_parts - 1)].extend(group)
        done += len(group)
    return parts
