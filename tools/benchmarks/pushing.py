"""Weight updates without a trainer around them: rank 0 pushes, and the other processes obey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dapo_mega.distributed.commands import Commanded, Own, command
from dapo_mega.distributed.processes import Processes
from dapo_mega.types import LogProbs, TokenIds
from dapo_mega.weight_sync.agreement import Agreement
from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
from dapo_mega.weight_sync.update import Sent, Transport, Update, UpdateCalls


class Pushing(Commanded):
    """`push` is called in all processes, each of which has the policy; rank 0 gets the metrics, the others none.
    `scores` are the policy's log-probs of the sequence on which engines must agree."""

    def __init__(
        self,
        processes: Processes,
        fleet: Any,
        config: Any,
        transport: Transport,
        run: str = "",
        agreement: Agreement | None = None,
        scores: Any = None,
    ) -> None:
        super().__init__(processes.control)
        self.transport = transport
        self.num_scored = 0
        self._policy: Any = None
        self._scores = scores
        self._sync = None
        if processes.rank == 0:
            self._sync = FleetWeightSync(self, fleet, config, transport, run, agreement)

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
    def send_weights(self, update: Update, forgotten: Sequence[str], calls: Own[UpdateCalls]) -> Sent:
        self.transport.forget(forgotten)
        return self.transport.send(self._policy, update, calls.value) if update.targets else Sent(0)

    def logprobs(self, tokens: TokenIds) -> LogProbs:
        self.num_scored += 1
        scores: LogProbs = self._scores
        return scores

    def close(self) -> None:
        self.transport.close()
