"""Weight updates without a trainer around them: rank 0 pushes, and the other processes obey."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dapo_mega.distributed.commands import Commanded, command, gathered
from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.sglang.weight_protocol import PlannedBucket
from dapo_mega.types import LogProbs, TokenIds
from dapo_mega.weight_sync.agreement import Agreement
from dapo_mega.weight_sync.broadcast import BroadcastSender, BroadcastTransport
from dapo_mega.weight_sync.disk import DiskTransport
from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
from dapo_mega.weight_sync.shared_memory import SharedMemorySender, SharedMemoryTransport
from dapo_mega.weight_sync.update import Sent, SharedBucket, Transport, Update, WeightSender


class Pushing(Commanded):
    """`push` is called in all processes, each of which has the policy; rank 0 gets the metrics, the others none.
    `scores` are the policy's log-probs of the sequence on which engines must agree."""

    def __init__(
        self,
        processes: Processes,
        fleet: Any,
        config: Any,
        sender: WeightSender | None,
        run: str = "",
        agreement: Agreement | None = None,
        scores: Any = None,
        folder: Path | None = None,
        export: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        super().__init__(processes.control)
        self.sender = sender
        self.export = export
        self.num_scored = 0
        self._policy: Any = None
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
        self._policy = policy
        if self._sync is None:
            self.obey()
            return {}
        with self.commanding():
            metrics: dict[str, float] = getattr(self._sync, method)(version)
        return metrics

    @command
    def weight_plan(self, *, have_plugin: bool) -> Sequence[Sequence[PlannedBucket]]:
        assert isinstance(self.sender, BroadcastSender)
        return self.sender.plan(self._policy, have_plugin=have_plugin)

    @command
    def send_weights(self, update: Update, forgotten: Sequence[str]) -> Sent:
        assert isinstance(self.sender, BroadcastSender)
        self.sender.forget(forgotten)
        return self.sender.send(self._policy, update)

    def share_weights(self, update: Update | None) -> SharedBucket | None:
        found = self._share_weights(update)
        return next((bucket for bucket in found if bucket and bucket.handles), found[0])

    @gathered
    def _share_weights(self, update: Update | None) -> SharedBucket | None:
        assert isinstance(self.sender, SharedMemorySender)
        return self.sender.share(self._policy, update)

    def logprobs(self, tokens: TokenIds) -> LogProbs:
        self.num_scored += 1
        scores: LogProbs = self._scores
        return scores

    def close(self) -> None:
        if self.sender:
            self.sender.close()
