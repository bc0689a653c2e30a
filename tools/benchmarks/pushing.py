"""Weight updates without a trainer around them: rank 0 pushes, and the other processes obey."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.engines.sglang.fleet_client import SyncTarget
from dapo_mega.types import LogProbs, TokenIds
from dapo_mega.weight_sync.agreement import Agreement
from dapo_mega.weight_sync.broadcast import BroadcastSender, BroadcastTransport, WeightCommands
from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
from dapo_mega.weight_sync.shared_memory import SharedMemorySender, SharedMemoryTransport
from dapo_mega.weight_sync.transports import DiskTransport
from dapo_mega.weight_sync.update import Transport

T = TypeVar("T")


class Pushing(WeightCommands):
    """`push` is called in all processes, each of which has the policy; rank 0 gets the metrics, the others none.
    `scores` are the policy's log-probs of the sequence on which engines must agree."""

    def __init__(
        self,
        processes: Processes,
        fleet: Any,
        config: Any,
        sender: BroadcastSender | SharedMemorySender | None,
        run: str = "",
        agreement: Agreement | None = None,
        scores: Any = None,
        folder: Path | None = None,
        export: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        super().__init__(processes.control)
        self.sender = sender
        self._export = export
        self.num_scored = 0
        self._scores = scores
        self._sync = None
        if processes.rank == 0:

            def make_transport() -> Transport:
                if isinstance(sender, BroadcastSender):
                    return BroadcastTransport(self, sender.places, config)
                return DiskTransport(self, folder) if folder else SharedMemoryTransport(self)

            self._sync = FleetWeightSync(self, fleet, config, make_transport, run, agreement)

    def push(self, policy: Any, version: int) -> dict[str, float]:
        return self._all("push", policy, version)

    def push_to_outdated(self, policy: Any, version: int) -> dict[str, float]:
        return self._all("push_to_outdated", policy, version)

    def _all(self, method: str, policy: Any, version: int) -> dict[str, float]:
        self.policy = policy
        if self._sync is None:
            self.obey()
            return {}
        with self.commanding():
            metrics: dict[str, float] = getattr(self._sync, method)(version)
        return metrics

    def export(self, folder: Path) -> None:
        self._export(folder)

    def logprobs(self, tokens: TokenIds) -> LogProbs:
        self.num_scored += 1
        scores: LogProbs = self._scores
        return scores

    def close(self) -> None:
        if isinstance(self.sender, BroadcastSender):
            self.sender.close()


class IdleEngines:
    """The first `num_engines` of a list, by default all; they do nothing else."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        self._thread = LoopThread("engines")
        self._clients = {url: EngineClient(url, "", timeout_s) for url in urls}
        self._joined: set[str] = set()
        self.num_engines = len(urls)

    def targets(self, only_outdated: bool) -> list[SyncTarget]:
        urls = list(self._clients)[: self.num_engines]
        return [SyncTarget(url, 1, has_plugin=True, is_outdated=url not in self._joined) for url in urls]

    def start_call(
        self, targets: Sequence[SyncTarget], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> Future[dict[str, T | EngineError]]:
        async def call() -> dict[str, T | EngineError]:
            results = await asyncio.gather(*(method(self._clients[target.url]) for target in targets))
            return {target.url: result for target, result in zip(targets, results, strict=True)}

        return self._thread.start(call())

    def pause_generation(self, targets: Sequence[SyncTarget]) -> list[SyncTarget]:
        return list(targets)

    def resume_generation(self, targets: Sequence[SyncTarget]) -> None: ...

    def synced(self, url: str, version: int) -> None:
        self._joined.add(url)

    def failed(self, url: str, reason: str) -> None:
        raise EngineError(url, reason)

    disagrees = failed

    def close(self) -> None:
        async def close() -> None:
            for client in self._clients.values():
                await client.close()

        self._thread.run(close())
        self._thread.close()
