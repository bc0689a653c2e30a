"""Hold -> begin -> send -> end -> release: the policy's weights to the engines of a fleet, under a new version.

Rank 0 alone speaks to the engines. An engine that fails, dies or hangs at any step is reported and left behind, within
the configured timeout per step; the others end up with the complete weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dapo_mega.config import WeightSyncConfig
from dapo_mega.errors import FleetError
from dapo_mega.handover import leaving_together
from dapo_mega.policy.processes import Processes
from dapo_mega.rollout.engine import WeightSource
from dapo_mega.rollout.engine_client import EngineClient, EngineRefused
from dapo_mega.rollout.versions import WeightVersion
from dapo_mega.weight_sync.update import EngineFleet, Session, Transport, Update

_MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class _Outcome:
    num_synced: int
    failures: Mapping[str, str]


class FleetWeightSync:
    """Implements `WeightSync` on every process."""

    def __init__(
        self,
        processes: Processes,
        fleet: EngineFleet | None,
        config: WeightSyncConfig,
        transport: Transport,
        run: str = "",
    ) -> None:
        """`fleet` is given exactly on rank 0; so is `run`, which names this start of the trainer to engines."""
        assert (fleet is not None) == (processes.rank == 0)
        self._processes = processes
        self._fleet = fleet
        self._timeout_s = config.timeout_s
        self._transport = transport
        self._run = run
        # Requests that wait in place keep their keys and values in the cache; the engine has no other then.
        self._flush_cache = (config.in_flight, config.pause) != ("continue", "in_place")
        self._num_updates = 0

    def push(self, policy: WeightSource, version: int) -> dict[str, float]:
        """See `WeightSync`. Raises FleetError when too few engines come, or none takes the weights."""
        started = time.perf_counter()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            metrics = self._push(policy, version, only_stale=False)
            if metrics["weight_sync/engines"]:
                return {
                    **metrics,
                    "weight_sync/attempts": float(attempt),
                    "time/weight_sync_s": time.perf_counter() - started,
                }
        raise FleetError(
            f"no engine took the weights of version {version} in {_MAX_ATTEMPTS} attempts (see the warnings above and "
            f"the engines' logs); mend the engines and start the run again: it continues from its last checkpoint"
        )

    def push_to_stale(self, policy: WeightSource, version: int) -> dict[str, float]:
        """See `WeightSync`."""
        return self._push(policy, version, only_stale=True)

    def _push(self, policy: WeightSource, version: int, only_stale: bool) -> dict[str, float]:
        update, session = self._begin(version, only_stale)
        started = time.perf_counter()
        num_bytes = self._transport.send(policy, update, session) if update.targets else 0
        seconds = time.perf_counter() - started
        outcome = self._end(update, session)
        return {
            "weight_sync/bytes": float(num_bytes),
            "weight_sync/bytes_per_s": num_bytes / seconds,
            "weight_sync/engines": float(outcome.num_synced),
            "weight_sync/engines_failed": float(len(outcome.failures)),
        }

    def _begin(self, version: int, only_stale: bool) -> tuple[Update, Session | None]:
        """Choose the engines, stop their generation and open their sessions."""
        self._num_updates += 1
        session = None
        box: list[Any] = [None]
        with leaving_together(self._processes.control):
            if self._fleet:
                targets = self._fleet.hold(self._fleet.targets(only_stale))
                stale = frozenset(target.url for target in targets if target.is_stale)
                label = str(WeightVersion(self._run, version))
                box[0] = Update(self._num_updates, version, label, tuple(targets), stale, self._flush_cache)
                session = Session(self._fleet, targets, self._timeout_s, self._transport.report_failure)
                if self._transport.uses_sessions:
                    session.call(_begin_session)
        dist.broadcast_object_list(box, src=0, group=self._processes.control)
        update: Update = box[0]
        return update, session

    def _end(self, update: Update, session: Session | None) -> _Outcome:
        """Close the sessions, say which engines are up to date and let these generate."""
        box: list[Any] = [None]
        if self._fleet and session:
            if self._transport.uses_sessions:
                session.call(_end_session)
            for target in session.targets:
                self._fleet.synced(target.url, update.version)
            for url, reason in session.failures.items():
                self._fleet.failed(url, f"it did not take the weights of version {update.version}: {reason}")
            self._fleet.release(update.targets)
            box[0] = _Outcome(len(session.targets), session.failures)
        dist.broadcast_object_list(box, src=0, group=self._processes.control)
        outcome: _Outcome = box[0]
        self._transport.forget(list(outcome.failures))
        return outcome

    def close(self) -> None:
        """Let go of what is shared with engines."""
        self._transport.close()


async def _begin_session(client: EngineClient) -> None:
    """Also where a trainer that is gone left one open."""
    try:
        await client.begin_weight_update()
    except EngineRefused:
        await client.end_weight_update()
        await client.begin_weight_update()


async def _end_session(client: EngineClient) -> None:
    await client.end_weight_update()
