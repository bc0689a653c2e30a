"""Updates a fleet's engines: pause generation, open sessions, send the weights, close the sessions, resume.

Only rank 0 calls the engines. An engine that fails, dies or hangs is reported and left out within the timeout of the
current call; the others get the complete weights.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dapo_mega.config import WeightSyncConfig
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError, EngineRefused
from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion
from dapo_mega.engines.sglang.weight_protocol import ADAPTER
from dapo_mega.errors import FleetError, TrainerLost
from dapo_mega.types import LogProbs, Selection
from dapo_mega.weight_sync.agreement import Agreement, engine_logprobs, mean_difference
from dapo_mega.weight_sync.update import Transport, Update, UpdateCalls, WeightSync

if TYPE_CHECKING:
    from dapo_mega.engines.sglang.fleet_client import FleetClient, SyncTarget
    from dapo_mega.weight_sync.broadcast import WeightCommands

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_SCORING_TIMEOUT_S = 120.0


class FleetWeightSync(WeightSync):
    """Sends weights to a fleet of SGLang engines."""

    def __init__(
        self,
        trainer: WeightCommands,
        fleet: FleetClient,
        config: WeightSyncConfig,
        make_transport: Callable[[], Transport],
        run: str = "",
        agreement: Agreement | None = None,
        adapter: Mapping[str, Any] | None = None,
        *,
        lends_memory: bool = False,
    ) -> None:
        """`make_transport` prepares the trainer, too. `run` names this start of the trainer to engines. With
        `agreement`, engines that join or come back are used only after their log-probs have agreed with the
        trainer's. With `adapter`, which is peft's configuration, engines that join or come back get the weights without
        adapters, and all get adapters. The trainer `lends_memory` to engines: beside them it has the weights that it
        sends, and nothing when they generate."""
        self._trainer = trainer
        self._lends_memory = lends_memory
        self._fleet = fleet
        self._timeout_s = config.timeout_s
        self._make_transport = make_transport
        self._transport = make_transport()
        self._run = run
        self._agreement = agreement
        self._adapter = adapter
        # Requests paused in place need their cached keys and values.
        self._flush_cache = (config.in_flight, config.pause) != ("continue", "in_place")
        self._num_updates = 0
        self._failed: list[str] = []
        self._expected: tuple[int, LogProbs] | None = None

    def push(self, version: int) -> dict[str, float]:
        """See `WeightSync`. Raises FleetError when too few engines are reachable, or every update fails."""
        started = time.perf_counter()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            metrics = self._push(version, only_outdated=False)
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

    def push_to_outdated(self, version: int) -> dict[str, float]:
        return self._push(version, only_outdated=True)

    def reopen(self) -> None:
        self._transport, self._failed = self._make_transport(), []

    def _push(self, version: int, only_outdated: bool) -> dict[str, float]:
        """Choose the engines, pause their generation, send them the weights, and resume."""
        fleet = self._fleet
        if self._lends_memory:  # Engines may start while it waits for them.
            self._trainer.hold("weights" if fleet.is_serving() else "nothing")
        chosen = fleet.targets(only_outdated)
        if self._lends_memory:
            fleet.sleep()  # Those that have joined are awake.
            self._trainer.hold("weights")
        targets = tuple(fleet.pause_generation(chosen))
        joining = tuple(target for target in targets if target.is_outdated)
        calls = UpdateCalls(fleet, targets, self._timeout_s, self._transport.report_failure)
        base_bytes = 0.0
        try:
            if (adapter := self._adapter) and joining:
                sizes = {target.url: target.tp_size for target in joining}
                calls.targets = list(joining)
                base_bytes = self._bring("base", version, calls, joining)["weight_sync/bytes"]
                calls.call(lambda client: client.add_adapter(ADAPTER, adapter, sizes[client.url]))
                calls.targets = [target for target in targets if target.url not in calls.failures]
            if adapter:
                metrics = self._bring("adapters", version, calls, ())
            else:
                metrics = self._bring("merged", version, calls, joining)
            failures = self._record(version, targets, calls)
        except TrainerLost as lost:
            calls.cancel()
            for target in targets:
                fleet.failed(target.url, f"its update to version {version} broke off: {lost}")
            fleet.resume_generation(targets)
            raise
        self._failed = list(failures)
        return {
            **metrics,
            "weight_sync/bytes": base_bytes + metrics["weight_sync/bytes"],
            "weight_sync/engines": float(len(targets) - len(failures)),
            "weight_sync/engines_failed": float(len(failures)),
        }

    def _bring(
        self, selection: Selection, version: int, calls: UpdateCalls, joining: Sequence[SyncTarget]
    ) -> dict[str, float]:
        """Send this selection to the targets of `calls`, of which those `joining` get none of the earlier ones'."""
        self._num_updates += 1
        targets, outdated = tuple(calls.targets), frozenset(target.url for target in joining)
        if self._transport.uses_sessions:
            calls.call(_begin_session)
        routes = self._transport.routes(self._num_updates, calls.targets, outdated)
        label = str(WeightVersion(self._run, version))
        update = Update(self._num_updates, version, label, targets, outdated, self._flush_cache, routes, selection)
        forgotten, self._failed = self._failed, []
        started = time.perf_counter()
        sent = self._transport.bring(update, calls, forgotten)
        seconds = time.perf_counter() - started
        if self._transport.uses_sessions:
            calls.call(lambda client: client.command("end_weight_update"))
        rate = sent.num_bytes / seconds
        return {"weight_sync/bytes": float(sent.num_bytes), "weight_sync/bytes_per_s": rate, **sent.metrics}

    def _record(self, version: int, targets: Sequence[SyncTarget], calls: UpdateCalls) -> dict[str, str]:
        """Record which engines have the weights, and resume generation; those that joined must agree with the trainer
        first. Returns why the others failed, by URL."""
        joined = [target for target in calls.targets if target.is_outdated] if self._agreement else []
        if joined and self._agreement and (self._expected is None or self._expected[0] != version):
            self._expected = version, self._trainer.logprobs(self._agreement.tokens)
        if self._lends_memory:
            self._trainer.hold("nothing")
        for target in calls.targets:
            if target not in joined:
                self._fleet.synced(target.url, version)
        for url, reason in calls.failures.items():
            self._fleet.failed(url, f"its update to version {version} failed: {reason}")
        self._fleet.resume_generation(targets)
        failures = dict(calls.failures)
        if joined and self._agreement:
            assert self._expected
            failures |= self._admit(self._agreement, joined, version, self._expected[1])
        return failures

    def _admit(
        self, agreement: Agreement, joined: Sequence[SyncTarget], version: int, expected: LogProbs
    ) -> dict[str, str]:
        """Record the engines that agree as up to date. Returns the errors of the others by URL."""
        fleet, tokens, tolerance = self._fleet, agreement.tokens, agreement.tolerance
        versions = VersionRange(self._run, version, version)
        failures: dict[str, str] = {}
        timeout_s = min(self._timeout_s, _SCORING_TIMEOUT_S)
        adapter = ADAPTER if self._adapter else ""
        scoring = fleet.start_call(
            joined, lambda client: engine_logprobs(client, tokens, versions, _SCORING_TIMEOUT_S, adapter), timeout_s
        )
        for url, scores in scoring.result().items():
            if isinstance(scores, EngineError):
                failures[url] = f"it did not score a sequence with its new weights: {scores.reason}"
                fleet.failed(url, failures[url])
            elif not (difference := mean_difference(scores, expected)) <= tolerance:
                failures[url] = (
                    f"with the weights of version {version} it gives {len(scores)} tokens of a fixed sequence "
                    f"log-probs that are {difference:.4g} nats from the trainer's on average, which is not within "
                    f"rollout.engine_tolerance={tolerance:g}: its model is not model.path's (config.json), or it "
                    "computes in another precision; start it with model.path's checkpoint, or raise the limit"
                )
                fleet.disagrees(url, failures[url])
            else:
                logger.info("engine %s agrees with the trainer to within %.2g nats on average", url, difference)
                fleet.synced(url, version)
        return failures


async def _begin_session(client: EngineClient) -> None:
    """Open a session; if an earlier trainer left one open, close that first."""
    try:
        await client.command("begin_weight_update")
    except EngineRefused:
        with contextlib.suppress(EngineRefused):  # Its weights were incomplete.
            await client.command("end_weight_update")
        await client.command("begin_weight_update")
