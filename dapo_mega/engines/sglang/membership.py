"""Which engines are in the fleet, and which weights they hold.

An engine passes through these states::

    joining -> outdated -> serving          answers probes -> its settings fit -> holds the current weights
       ^         |         |
       +------ away <------+             dead or hung: its work moves to others at once

Only serving engines get requests, so no answer comes from other weights. A serving engine can be `reserved`: it keeps
its weights and answers nothing of training until it is given back, and is then outdated. Everything runs on one event
loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any, Literal

from dapo_mega.config import RunConfig
from dapo_mega.data.tokenizer import load_tokenizer
from dapo_mega.engines.sglang.api import RouteSizes
from dapo_mega.engines.sglang.dispatcher import Dispatcher
from dapo_mega.engines.sglang.engine_client import (
    EngineClient,
    EngineError,
    EngineInfo,
    EngineRefused,
    is_no_engine,
    one_line,
)
from dapo_mega.engines.sglang.engine_commands import INSTALL_PLUGIN
from dapo_mega.engines.sglang.engine_fit import incompatibility, no_engine
from dapo_mega.engines.sglang.engine_model import model_difference
from dapo_mega.engines.sglang.event_loop import report_fault
from dapo_mega.engines.sglang.health import HealthMonitor
from dapo_mega.engines.sglang.registry import EngineRegistry, Registration
from dapo_mega.engines.sglang.versions import WeightVersion
from dapo_mega.engines.sglang.weight_protocol import ADAPTER, OTHER_MODEL, PROTOCOL
from dapo_mega.models import Architecture
from dapo_mega.rewards.bounded_http import raise_file_limit

logger = logging.getLogger(__name__)

_UPKEEP_S = 1.0
_ABORT_TIMEOUT_S = 10.0
_MAX_FAILED_UPDATES = 3
_REASON_LENGTH = 1000  # Of what may quote an engine.
# A killed trainer's unfinished update may end after this run's first update.
_LATE_UPDATES = 1

State = Literal["joining", "outdated", "serving", "reserved", "away", "refused"]
PRESENT: tuple[State, ...] = ("outdated", "serving", "reserved")
"""The states of an engine that is in the fleet."""


@dataclass
class Member:
    """One engine. `version` is its weight version, -1 if the weights are not this run's. `asleep` is the memory that it
    was told to free. `changes` counts joins and departures, so that an outdated join or update notices;
    `update_began_at` is what it was when the latest update began. `missing_since` (monotonic clock) is when it was
    first watched, or left the last time. `foreign` are the other run's weights that the engine last held after it had
    this run's; `num_foreign` counts how often this happened. `disagreed`: after its last update its log-probs were not
    the trainer's."""

    client: EngineClient
    instance: str = ""
    state: State = "joining"
    info: EngineInfo | None = None
    version: int = -1
    reason: str = ""
    asleep: frozenset[str] = frozenset()
    failed_updates: int = 0
    changes: int = 0
    missing_since: float = field(default_factory=time.monotonic)
    foreign: WeightVersion | None = None
    num_foreign: int = 0
    update_began_at: int = -1
    disagreed: bool = False


class Membership:
    """Adds and removes engines as registry, monitor and dispatcher report them. Made on a running event loop."""

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        api_key: str,
        registry: EngineRegistry | None,
        run: str = "",
        arch: Architecture | None = None,
    ) -> None:
        """Watch the engines of `rollout.fleet.urls` and those that register. `vocab_size` bounds the ids that are sent;
        `run` names this start of the trainer. Engines that report their model must have one of sizes `arch`. `conflict`
        is an error text once another trainer certainly uses an engine. `on_departure(url, reason)` is called after an
        engine has left.
        """
        self.members: dict[str, Member] = {}
        self.counts: Counter[str] = Counter()
        self.conflict = ""
        self._run = run
        self._arch = arch
        self._config = config
        self._fleet = config.rollout.fleet
        self._vocab_size = vocab_size
        self._api_key = api_key
        self._registry = registry
        self._joins: set[asyncio.Task[None]] = set()
        self.on_departure: Callable[[str, str], None] = lambda url, reason: None
        self.dispatcher = self.make_dispatcher(share_of_files=0.5)
        self.monitor = HealthMonitor(
            heartbeat_s=self._fleet.heartbeat_s,
            hung_after_s=self._fleet.hung_after_s,
            on_change=self._changed,
            on_fault=self._end_with_fault,
        )
        for url in self._fleet.urls:
            self._watch(url, instance="")
        self._upkeep = asyncio.create_task(self._poll(), name="taking engines up")
        self._upkeep.add_done_callback(self._end_with_fault)

    def _end_with_fault(self, task: asyncio.Task[None]) -> None:
        """End the run with the unexpected exception of a task without which the fleet would wait for ever."""
        report_fault(task)
        if not task.cancelled() and (fault := task.exception()):
            self.conflict = f"{task.get_name()} ended with an unexpected exception, so the run ends: {fault!r}"

    def make_dispatcher(self, share_of_files: float = 0.25) -> Dispatcher:
        """A dispatcher that has no engine yet. Its calls may have this share of the files that this process may open:
        the rest is for idle connections, probes, and all that is not about engines."""
        return Dispatcher(
            vocab_size=self._vocab_size,
            requests_per_engine=self._fleet.requests_per_engine,
            request_timeout_s=self._fleet.request_timeout_s,
            max_attempts=self._config.rollout.max_attempts,
            on_trouble=lambda url: self.monitor.watches[url].wanted.set(),
            on_wrong_weights=self._answered_with_wrong_weights,
            run=self._run,
            seed=self._config.seed,
            most_calls=max(1, int(share_of_files * raise_file_limit())),
            adapter=ADAPTER if self._config.sends_adapters else "",
            route_sizes=RouteSizes.of(self._arch) if self._arch else None,
            # Loaded when the first call is cut off.
            decode=(lambda tokens: self._tokenizer.decode(tokens)) if self._config.rollout.stop else None,
        )

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._config.model.path)

    def in_state(self, *states: State) -> list[str]:
        return [url for url, member in list(self.members.items()) if member.state in states]

    def leave(self, url: str, reason: str) -> None:
        """Remove the engine until it joins again."""
        member = self.members[url]
        if member.state == "serving":
            self.dispatcher.remove_engine(url, reason)
        was_present = member.state in PRESENT
        member.changes += 1
        member.state, member.version, member.reason = "away", -1, reason
        if was_present:
            member.missing_since = time.monotonic()
            logger.warning("engine %s has left the fleet (%s); its work moves to the others", url, reason)
            self.on_departure(url, reason)

    def reserve(self, url: str) -> EngineClient:
        """Take a serving engine out of training: its requests go on elsewhere, and until `give_back` it gets neither
        requests nor weights."""
        member = self.members[url]
        assert member.state == "serving"
        self.dispatcher.withdraw_engine(url)
        member.changes += 1
        member.state = "reserved"
        return member.client

    async def give_back(self, url: str) -> None:
        """End a reserved engine's calls; it then waits for the current weights. Ignored if the engine has left."""
        member = self.members[url]
        if member.state != "reserved":
            return
        change = member.changes
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await member.client.abort(all=True)
        except (EngineError, TimeoutError) as error:
            if member.changes == change:
                self.leave(url, f"its calls could not be ended: {error}")
        if member.changes == change:
            member.state, member.version = "outdated", -1

    def synced(self, url: str, version: int) -> None:
        """Record that the engine holds weights of this version and serves; ignored if it has left meanwhile."""
        member = self.members[url]
        if member.changes != member.update_began_at:
            return
        if member.state == "outdated":
            assert member.info
            self.dispatcher.add_engine(member.client, version)
        elif member.state == "serving":
            self.dispatcher.set_version(url, version)
        else:
            return
        member.state, member.version, member.failed_updates = "serving", version, 0
        member.foreign, member.disagreed = None, False

    def disagrees(self, url: str, reason: str) -> None:
        """Remove an updated engine whose log-probs are not the trainer's, and refuse it the second time. The first time
        a killed trainer's unfinished update may be the cause."""
        member = self.members[url]
        if member.changes != member.update_began_at:
            return
        if not member.disagreed:
            self.failed(url, reason)
            member.disagreed = True
            return
        self.counts["failed_updates"] += 1
        member.changes += 1
        self._refuse(member, reason)

    def failed(self, url: str, reason: str) -> None:
        """Remove an engine whose update failed, and refuse it after several failures in a row."""
        member = self.members[url]
        self.counts["failed_updates"] += 1
        self.leave(url, reason)
        member.failed_updates += 1
        if OTHER_MODEL in reason:
            self._refuse(
                member, f"{OTHER_MODEL}{reason.partition(OTHER_MODEL)[2]}; start it with model.path's checkpoint"
            )
        elif member.failed_updates >= _MAX_FAILED_UPDATES:
            self._refuse(member, f"{_MAX_FAILED_UPDATES} updates in a row failed, lastly: {reason}")

    def reported(self, url: str, version: str) -> None:
        """Remove the engine if the weights that it reports are another run's."""
        held = WeightVersion.parse(version)
        if held and held.run != self._run and self.members[url].state == "serving":
            self._report_foreign(url, held)
            self.leave(url, f"it holds weights of {held.describe()}")

    def _answered_with_wrong_weights(self, url: str, foreign: WeightVersion | None) -> None:
        if foreign:
            self._report_foreign(url, foreign)
        self.leave(url, "it answered with other weights than it was given")

    def _report_foreign(self, url: str, foreign: WeightVersion) -> None:
        """Warn of another run's weights in an engine that this run uses; the second time is a conflict."""
        member = self.members[url]
        member.foreign = foreign
        member.num_foreign += 1
        if member.num_foreign > _LATE_UPDATES:
            self.conflict = (
                f"another trainer uses this engine: {url} was given weights of run {self._run} and came to hold those "
                f"of {foreign.describe()}, for the second time; no response sampled with these was used. End one of "
                "the two runs or give each its own engines, and run the same command: training resumes from the last "
                "checkpoint"
            )
        else:
            logger.warning(
                "engine %s holds weights of %s, which this run (%s) did not send: an earlier trainer's "
                "unfinished update, or another trainer uses this engine",
                url,
                foreign.describe(),
                self._run,
            )

    async def close(self) -> None:
        """Stop watching and close the connections."""
        for task in [self._upkeep, *self._joins]:
            task.cancel()
        await asyncio.gather(self._upkeep, *self._joins, return_exceptions=True)
        await self.monitor.close()
        await self.dispatcher.close()
        for member in self.members.values():
            await member.client.close()

    async def _poll(self) -> None:
        """Start joins of engines that register, and of healthy engines that had left."""
        while True:
            if self._registry:
                for registration in self._registry.poll():
                    self._register(registration)
                # What is hung for longer than one call of an update may take does not recover by itself.
                self._registry.report_hung(
                    self.members[url].instance
                    for url, health in self.monitor.watches.items()
                    if health.state == "hung" and health.state_s > self._config.weight_sync.timeout_s
                )
            for url, health in self.monitor.watches.items():
                if health.state == "healthy" and self.members[url].state == "away":
                    self._start_join(url)
            await asyncio.sleep(min(self._fleet.heartbeat_s, _UPKEEP_S))

    def _register(self, registration: Registration) -> None:
        known = self.members.get(registration.url)
        if known is None:
            logger.debug("engine %s has registered", registration.url)
            self._watch(registration.url, registration.instance)
        elif known.instance != registration.instance:
            known.instance = registration.instance
            if known.state in PRESENT:
                self.leave(registration.url, "it was restarted")

    def _watch(self, url: str, instance: str) -> None:
        client = EngineClient(url, self._api_key, timeout_s=self._config.weight_sync.timeout_s)
        self.members[url] = Member(client, instance)
        self.monitor.watch(client)

    async def _changed(self, url: str, old: str, new: str, reason: str) -> None:
        """Handle a new verdict of the monitor on an engine."""
        if new in ("dead", "hung"):
            self.counts[f"engines_{new}"] += 1
            self.leave(url, f"{new}: {reason}")
        elif new == "foreign":
            self.leave(url, reason)
            self._refuse(self.members[url], no_engine(reason))
        elif new == "healthy" and self.members[url].state not in PRESENT:
            self._start_join(url)

    def _start_join(self, url: str) -> None:
        """Join the engine in a task, as it may take long to answer."""
        member = self.members[url]
        member.changes += 1
        member.state = "joining"
        task = asyncio.create_task(self._join(url, member, member.changes), name=f"joining {url}")
        self._joins.add(task)
        task.add_done_callback(self._joins.discard)
        task.add_done_callback(self._end_with_fault)

    async def _join(self, url: str, member: Member, change: int) -> None:
        """Check the engine's settings, and resume it and abort its calls, which an earlier trainer may have left."""
        try:
            info = await member.client.info()
        except EngineError as error:
            if member.changes != change:
                return
            if isinstance(error, EngineRefused) and error.status == HTTPStatus.UNAUTHORIZED:
                name = self._fleet.api_key_env
                self._refuse(member, f"it rejects the API key in {name}; give trainer and engines the same key")
            elif is_no_engine(error):
                self._refuse(member, no_engine(error.reason))
            else:
                member.state, member.reason = "away", str(error)
            return
        try:
            if member.changes != change:
                return
            is_new = member.info is None or info.process != member.info.process
            if is_new:
                member.asleep, member.failed_updates, member.disagreed = frozenset(), 0, False
            # At an engine's first join its weights may be any run's, which is no conflict.
            held = WeightVersion.parse(info.weight_version)
            if held and held.run != self._run:
                if not is_new and held != member.foreign:
                    self._report_foreign(url, held)
                member.foreign = held
            member.info = info
            difference = incompatibility(info, self._config, self._vocab_size)
            if not difference and self._arch:
                difference = model_difference(info.model, self._arch)
            if difference:
                self._refuse(member, difference)
                return
            await member.client.resume()
            if member.changes == change:
                await member.client.abort(all=True)
        except EngineError as error:
            if member.changes == change:
                member.state, member.reason = "away", str(error)
            return
        if member.changes == change:
            member.state, member.version, member.reason = "outdated", -1, ""
            self.counts["engines_joined"] += 1
            logger.info("engine %s (SGLang %s) is ready for weights", url, info.version)
            self._warn_about_plugin(url, info)

    def _warn_about_plugin(self, url: str, info: EngineInfo) -> None:
        if info.has_plugin:
            return
        if info.plugin_protocol is not None:
            logger.warning(
                "engine %s has another version of dapo_mega (weight protocol %s; this trainer: %d), so all engines get "
                "weights without the plugin; install the trainer's project folder in the engine's environment and "
                "restart the engine: %s",
                url,
                info.plugin_protocol,
                PROTOCOL,
                INSTALL_PLUGIN,
            )
        if self._config.weight_sync.full_every > 1:
            logger.warning(
                "engine %s lacks this version of the plugin, so all engines get all weights at every update: "
                "weight_sync.full_every=%d needs dapo_mega installed in every engine's environment (in the project "
                "folder: %s)",
                url,
                self._config.weight_sync.full_every,
                INSTALL_PLUGIN,
            )

    def _refuse(self, member: Member, reason: str) -> None:
        member.state, member.reason = "refused", one_line(reason, _REASON_LENGTH)
        logger.warning("engine %s is refused: %s", member.client.url, member.reason)
