"""Updates a fleet's engines: pause generation, open sessions, send the weights, close the sessions, resume.

Only rank 0 calls the engines. An engine that fails, dies or hangs is reported and left out within the timeout of the
current call; the others get the complete weights.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError, EngineRefused
from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion
from dapo_mega.errors import FleetError
from dapo_mega.types import LogProbs, WeightSource
from dapo_mega.weight_sync.agreement import Agreement, engine_logprobs, mean_difference
from dapo_mega.weight_sync.push import WeightSync
from dapo_mega.weight_sync.update import EngineFleet, Sent, Transport, Update, UpdateCalls

if TYPE_CHECKING:
    from dapo_mega.engines.sglang.fleet_client import SyncTarget

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_SCORING_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class _Outcome:
    num_synced: int
    failures: Mapping[str, str]


class FleetWeightSync(WeightSync):
    """Sends weights to a fleet of SGLang engines; every rank has one."""

    def __init__(
        self,
        processes: Processes,
        fleet: EngineFleet | None,
        config: WeightSyncConfig,
        transport: Transport,
        run: str = "",
        agreement: Agreement | None = None,
    ) -> None:
        """`fleet` is given on rank 0 only. `run` names this start of the trainer to engines. With `agreement`, engines
        that join or come back are used only after their log-probs have agreed with the trainer's."""
        assert (fleet is not None) == (processes.rank == 0)
        self._processes = processes
        self._fleet = fleet
        self._timeout_s = config.timeout_s
        self._transport = transport
        self._run = run
        self._agreement = agreement
        # Requests paused in place need their cached keys and values.
        self._flush_cache = (config.in_flight, config.pause) != ("continue", "in_place")
        self._num_updates = 0

    def push(self, policy: WeightSource, version: int) -> dict[str, float]:
        """See `WeightSync`. Raises FleetError when too few engines are reachable, or every update fails."""
        started = time.perf_counter()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            metrics = self._push(policy, version, only_outdated=False)
            if metrics["weight_sync/engines"]:
                return {
                    **metrics,
                    "weight_sync/attempts": float(attempt),
                    "time/weight_sync_s": time.perf_counter() - started,
                }
        raise FleetError(
            f"no engine took the weights of version {version} in {_MAX_ATTEMPTS} attempts (see the warnings above and "
            f"the engines' logs); restart the engines and run the same command: training resumes from the last "
            f"checkpoint"
        )

    def push_to_outdated(self, policy: WeightSource, version: int) -> dict[str, float]:
        return self._push(policy, version, only_outdated=True)

    def _push(self, policy: WeightSource, version: int, only_outdated: bool) -> dict[str, float]:
        update, session = self._begin(version, only_outdated)
        started = time.perf_counter()
        sent = self._transport.send(policy, update, session) if update.targets else Sent(0)
        seconds = time.perf_counter() - started
        expected = self._agreement.expected(version) if self._agreement and update.outdated else None
        outcome = self._end(update, session, expected)
        return {
            "weight_sync/bytes": float(sent.num_bytes),
            "weight_sync/bytes_per_s": sent.num_bytes / seconds,
            "weight_sync/engines": float(outcome.num_synced),
            "weight_sync/engines_failed": float(len(outcome.failures)),
            **sent.metrics,
        }

    def _begin(self, version: int, only_outdated: bool) -> tuple[Update, UpdateCalls | None]:
        """Choose the engines, pause their generation and open their sessions."""
        self._num_updates += 1
        session = None
        box: list[Any] = [None]
        with raise_on_all_ranks(self._processes.control):
            if self._fleet:
                targets = self._fleet.pause_generation(self._fleet.targets(only_outdated))
                outdated = frozenset(target.url for target in targets if target.is_outdated)
                label = str(WeightVersion(self._run, version))
                session = UpdateCalls(self._fleet, targets, self._timeout_s, self._transport.report_failure)
                if self._transport.uses_sessions:
                    session.call(_begin_session)
                number = self._num_updates
                routes = self._transport.routes(number, session.targets, outdated)
                box[0] = Update(number, version, label, tuple(targets), outdated, self._flush_cache, routes)
        dist.broadcast_object_list(box, src=0, group=self._processes.control)
        update: Update = box[0]
        return update, session

    def _end(self, update: Update, session: UpdateCalls | None, expected: LogProbs | None) -> _Outcome:
        """Close the sessions, record which engines have the weights, and resume generation. If `expected` log-probs are
        given, engines that joined must agree with them first."""
        box: list[Any] = [None]
        if self._fleet and session:
            if self._transport.uses_sessions:
                session.call(_end_session)
            joined = [t for t in session.targets if t.url in update.outdated] if expected is not None else []
            for target in session.targets:
                if target not in joined:
                    self._fleet.synced(target.url, update.version)
            for url, reason in session.failures.items():
                self._fleet.failed(url, f"its update to version {update.version} failed: {reason}")
            self._fleet.resume_generation(update.targets)
            failures = dict(session.failures)
            if expected is not None:
                failures |= self._admit(self._fleet, joined, update, expected)
            box[0] = _Outcome(len(update.targets) - len(failures), failures)
        dist.broadcast_object_list(box, src=0, group=self._processes.control)
        outcome: _Outcome = box[0]
        self._transport.forget(list(outcome.failures))
        return outcome

    def _admit(
        self, fleet: EngineFleet, joined: Sequence[SyncTarget], update: Update, expected: LogProbs
    ) -> dict[str, str]:
        """Record the engines that agree as up to date. Returns the errors of the others by URL."""
        assert self._agreement
        tokens, tolerance = self._agreement.tokens, self._agreement.tolerance
        versions = VersionRange(self._run, update.version, update.version)

        async def score(client: EngineClient) -> LogProbs:
            return await engine_logprobs(client, tokens, versions, _SCORING_TIMEOUT_S)

        failures: dict[str, str] = {}
        timeout_s = min(self._timeout_s, _SCORING_TIMEOUT_S)
        for url, scores in fleet.start_call(joined, score, timeout_s).result().items():
            if isinstance(scores, EngineError):
                failures[url] = f"it did not score a sequence with its new weights: {scores.reason}"
                fleet.failed(url, failures[url])
            elif not (difference := mean_difference(scores, expected)) <= tolerance:
                failures[url] = _disagreement(difference, len(scores), update.version, tolerance)
                fleet.disagrees(url, failures[url])
            else:
                logger.info("engine %s agrees with the trainer to within %.2g nats on average", url, difference)
                fleet.synced(url, update.version)
        return failures

    def close(self) -> None:
        """Free what is shared with engines."""
        self._transport.close()


def _disagreement(difference: float, num_tokens: int, version: int, tolerance: float) -> str:
    return (
        f"with the weights of version {version} it gives {num_tokens} tokens of a fixed sequence log-probs that are "
        f"{difference:.4g} nats from the trainer's on average, which is not within rollout.engine_tolerance="
        f"{tolerance:g}: its model is not model.path's (config.json), or it computes in another precision; start it "
        "with model.path's checkpoint, or raise the limit"
    )


async def _begin_session(client: EngineClient) -> None:
    """Open a session; if an earlier trainer left one open, close that first."""
    try:
        await client.begin_weight_update()
    except EngineRefused:
        with contextlib.suppress(EngineRefused):  # Its weights were incomplete.
            await client.end_weight_update()
        await client.begin_weight_update()


async def _end_session(client: EngineClient) -> None:
    await client.end_weight_update()
