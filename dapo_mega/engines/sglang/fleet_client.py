"""Rank 0's client of a fleet of SGLang engines: sends requests and weight updates, and waits for enough engines.

Requests are made on an event loop in a thread of its own, by coroutines that `run` and `start` bring there. All other
methods are for the main thread. `membership.py` decides which engines take part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dapo_mega.config import RunConfig
from dapo_mega.engines.protocol import ReservedEngines, RolloutFleet
from dapo_mega.engines.sglang.absences import describe_absences
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError, EngineRefused
from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.engines.sglang.membership import Membership, State
from dapo_mega.engines.sglang.registry import EngineRegistry
from dapo_mega.engines.sglang.reserved_engines import ReservedOfFleet
from dapo_mega.errors import FleetError
from dapo_mega.metrics.timeline import Load
from dapo_mega.models import Architecture

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.1
_ABORT_EVERY_S = 0.1
_ABORT_TIMEOUT_S = 1.0
_CALL_TIMEOUT_S = 60.0
_REGISTRATION_GRACE_S = 30.0
_SPARE_ENGINES_GRACE_S = 60.0
_REMIND_EVERY_S = 60.0
_ALL_MEMORY = frozenset({"weights", "kv_cache", "cuda_graph"})
_SHOWN: Final[tuple[State, ...]] = ("serving", "reserved", "away")
_COUNTED = ("engines_dead", "engines_hung", "engines_joined", "failed_updates", "pauses")


@dataclass(frozen=True)
class SyncTarget:
    """An engine to update, with `tp_size` ranks. `is_outdated`: the engine joined or came back since the last update.
    `has_plugin`: the engine has `dapo_mega.sglang_plugin`."""

    url: str
    tp_size: int
    is_outdated: bool = False
    has_plugin: bool = False


class FleetClient(RolloutFleet):
    """All engines of a run, over HTTP."""

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        api_key: str,
        run: str = "",
        arch: Architecture | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`vocab_size` bounds the token ids that are sent. `run` names this start of the trainer to engines. The
        engines' models must have the sizes `arch`. `check_stop` is called during waits and may raise StopRequested.
        Raises InputError when rollout.fleet.rendezvous is taken."""
        self._config = config
        self._check_stop = check_stop
        self._fleet = config.rollout.fleet
        self._registry = EngineRegistry(self._fleet.rendezvous, api_key) if self._fleet.rendezvous else None
        self._thread = LoopThread("rollout-fleet")
        self._membership = self._thread.call(lambda: Membership(config, vocab_size, api_key, self._registry, run, arch))
        self._members = self._membership.members
        self._dispatcher = self._membership.dispatcher
        self.generate, self.open = self._dispatcher.generate, self._dispatcher.open
        self._monitor = self._membership.monitor
        self._spares_until = time.monotonic() + _SPARE_ENGINES_GRACE_S
        self._reserved: ReservedOfFleet | None = None
        self._reserving = asyncio.Lock()

    # ---- generation, on the event loop ----

    @contextlib.asynccontextmanager
    async def reserved(
        self, *, version: int, num_engines: int | None, limit_s: float
    ) -> AsyncIterator[ReservedEngines]:
        """See `RolloutFleet`. At least `min_engines` engines are left to training, unless all are asked for. In the
        end the reserved engines wait for the current weights."""
        others = 0 if num_engines is None else self._fleet.min_engines
        assert not self._reserving.locked()
        async with self._reserving, ReservedOfFleet(self._membership, version, num_engines, others, limit_s) as engines:
            self._reserved = engines
            yield engines

    # ---- from the main thread ----

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """See `RolloutFleet`. Engines that join or come back meanwhile are updated."""
        return self._thread.complete(work, self.tend)

    def tend(self) -> None:
        """Wait for enough engines; those that have joined get the weights."""
        self.wait_for_engines()
        if self.has_outdated():
            self.update_outdated()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self._thread.start(work)

    def call(self, function: Callable[[], T]) -> T:
        return self._thread.call(function, _CALL_TIMEOUT_S)

    def has_outdated(self) -> bool:
        """Whether engines wait for the current weights."""
        return bool(self._membership.in_state("outdated"))

    def is_serving(self) -> bool:
        """See `RolloutFleet`."""
        return bool(self._membership.in_state("serving"))

    def pop_metrics(self) -> dict[str, float]:
        return self.call(self._pop_metrics)

    def pop_loads(self) -> Mapping[str, Sequence[Load]]:
        return self.call(self._dispatcher.pop_loads)

    def _pop_metrics(self) -> dict[str, float]:
        counts = self._membership.counts.copy()
        self._membership.counts.clear()
        return {
            **{f"fleet/engines_{state}": float(len(self._membership.in_state(state))) for state in _SHOWN},
            **{f"fleet/{name}": float(counts[name]) for name in _COUNTED},
            **self._monitor.metrics(),
            **self._dispatcher.pop_metrics(),
        }

    # ---- weight updates, from the main thread ----

    def targets(self, only_outdated: bool) -> list[SyncTarget]:
        """The engines that can be updated, once at least `min_engines` are reachable.

        While the run waits, logs each minute which engines are missing and why. Raises FleetError after `wait_limit_s`,
        or when no known engine fits the run.
        """
        self.wait_for_engines()
        # Before a run's first weights, the engines that evaluations beside training will take have some time to join.
        evaluation = self._config.evaluation
        wanted = self._fleet.min_engines + (evaluation.engines if evaluation.beside_training else 0)
        while self._num_reachable() < wanted and time.monotonic() < self._spares_until:
            self._check_stop()
            time.sleep(_POLL_S)
        self._spares_until = 0.0
        members = self._membership
        return self._targets(members.in_state("outdated") if only_outdated else members.in_state("outdated", "serving"))

    def _targets(self, urls: Sequence[str]) -> list[SyncTarget]:
        members = [(url, self._members[url]) for url in urls]
        return [
            SyncTarget(url, m.info.tp_size, m.state == "outdated", m.info.has_plugin) for url, m in members if m.info
        ]

    def wait_for_engines(self) -> None:
        """Return when at least `min_engines` are reachable; see `targets`. Also raises FleetError when another trainer
        uses the engines, and StopRequested when the run is to stop."""
        started = time.monotonic()
        is_paused = False
        speaks_next = self._fleet.heartbeat_s
        while True:
            self._check_stop()
            if self._membership.conflict:
                raise FleetError(self._membership.conflict)
            if (present := self._num_reachable()) >= self._fleet.min_engines:
                break
            waited = time.monotonic() - started
            members = dict(self._members)
            refused = [f"{url}: {member.reason}" for url, member in members.items() if member.state == "refused"]
            is_late = self._registry is None or waited > _REGISTRATION_GRACE_S
            if is_late and refused and len(refused) == len(members):
                raise FleetError(f"no engine fits the run: {'; '.join(refused)}")
            if waited > self._fleet.wait_limit_s:
                raise FleetError(
                    f"{present} of {self._fleet.min_engines} required engines (rollout.fleet.min_engines) are "
                    f"reachable after {waited:.0f} s ({self._absences()[0]}); see their logs, start engines with "
                    f"launch/serve_rollouts.py, and run the same command, which continues"
                )
            if waited > speaks_next:
                self._membership.counts["pauses"] += not is_paused
                is_paused = True
                speaks_next = waited + _REMIND_EVERY_S
                logger.warning(
                    "the run is paused: %d of %d required engines are reachable, waited %.0f of at most %.0f s; "
                    "missing: %s; what to do: %s",
                    *(present, self._fleet.min_engines, waited, self._fleet.wait_limit_s, *self._absences()),
                )
            time.sleep(_POLL_S)
        if is_paused:
            logger.warning("the run continues with %d engines", present)

    def _num_reachable(self) -> int:
        return len(self._membership.in_state("outdated", "serving"))

    def _absences(self) -> tuple[str, str]:
        """Which engines are missing, and what to do."""
        return self.call(lambda: describe_absences(self._members, self._monitor.watches, self._fleet))

    def start_call(
        self, targets: Sequence[SyncTarget], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> Future[dict[str, T | EngineError]]:
        """Start a call on all targets at once; the future gives the result or error by URL."""
        return self._thread.start(self._call([target.url for target in targets], method, timeout_s))

    async def _call(
        self, urls: Sequence[str], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> dict[str, T | EngineError]:
        async def one(url: str) -> T | EngineError:
            try:
                async with asyncio.timeout(timeout_s):
                    return await method(self._members[url].client)
            except EngineError as error:
                return error
            except TimeoutError:
                return EngineError(url, f"no answer within {timeout_s:g} s")

        return dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))

    def pause_generation(self, targets: Sequence[SyncTarget]) -> list[SyncTarget]:
        """Stop dispatching to the targets, then drain or pause running requests as `weight_sync.in_flight` says.
        Returns the targets that are still reachable."""
        return self._targets(self._thread.run(self._pause_generation([target.url for target in targets])))

    async def _pause_generation(self, urls: Sequence[str]) -> list[str]:
        if serving := self._present(urls, "serving"):
            limit_s = min(self._config.weight_sync.timeout_s, self._fleet.hung_after_s)
            await self._drain_or_pause(serving, limit_s)
            # Another trainer may have updated the engines since this one did.
            left = self._present(serving, "serving")
            for url, version in (await self._call(left, EngineClient.weight_version, limit_s)).items():
                if isinstance(version, str):
                    self._membership.reported(url, version)
        # Probes find hung engines up to here; a paused engine cannot answer probes.
        for url in (present := self._present(urls, "outdated", "serving")):
            await self._monitor.suspend(url)
        await self._wake(present, frozenset({"weights"}))
        for url in present:
            self._members[url].update_began_at = self._members[url].changes
        return present

    def _present(self, urls: Sequence[str], *states: State) -> list[str]:
        return [url for url in urls if self._members[url].state in states]

    async def _drain_or_pause(self, urls: Sequence[str], limit_s: float) -> None:
        sync = self._config.weight_sync
        self._dispatcher.hold()
        if sync.in_flight == "finish":
            await self._dispatcher.drain()
            return
        mode = sync.pause
        if mode == "abort":
            await self._take_back(urls, limit_s)
            mode = "retract"  # Nothing is left to abort, and SGLang's own `abort` takes a second to notice.
        await self._call(urls, lambda client: client.pause(mode), limit_s)

    async def _take_back(self, urls: Sequence[str], limit_s: float) -> None:
        """Abort all calls repeatedly, as a call may reach its engine after the first abort. SGLang's pause would abort
        them too, but checks only once a second whether all have ended, and keeps calls that arrive meanwhile."""
        returning = asyncio.create_task(self._dispatcher.reclaim(limit_s))
        while not returning.done():
            await self._call(urls, lambda client: client.abort(all=True), _ABORT_TIMEOUT_S)
            await asyncio.wait([returning], timeout=_ABORT_EVERY_S)
        await returning

    def resume_generation(self, targets: Sequence[SyncTarget]) -> None:
        """Undo `pause_generation`."""
        self._thread.run(self._resume_generation([target.url for target in targets]))

    async def _resume_generation(self, urls: Sequence[str]) -> None:
        await self._wake(urls, _ALL_MEMORY)
        present = self._present(urls, "outdated", "serving")
        self._remove_failed(await self._call(present, lambda client: client.resume(), _CALL_TIMEOUT_S))
        for url in urls:
            self._monitor.resume(url)
        self._dispatcher.resume()

    def _remove_failed(self, results: Mapping[str, object]) -> None:
        """Remove engines whose call failed until they join again."""
        for url, result in results.items():
            if isinstance(result, EngineError):
                self._membership.leave(url, result.reason)

    # See `Membership` for these three.

    def synced(self, url: str, version: int) -> None:
        self.call(lambda: self._membership.synced(url, version))

    def failed(self, url: str, reason: str) -> None:
        self.call(lambda: self._membership.failed(url, reason))

    def disagrees(self, url: str, reason: str) -> None:
        self.call(lambda: self._membership.disagrees(url, reason))

    # ---- colocated engines, from the main thread ----

    def sleep(self) -> None:
        """Free the memory of colocated engines, weights included, until the next update."""
        if self._config.rollout.placement == "colocated":
            self._thread.run(self._sleep())

    async def _sleep(self) -> None:
        self._dispatcher.hold()
        await self._dispatcher.drain()
        urls = [url for url in self._membership.in_state("outdated", "serving") if not self._members[url].asleep]
        for url in urls:
            await self._monitor.suspend(url)
        results = await self._call(urls, _fall_asleep, _CALL_TIMEOUT_S)
        self._remove_failed(results)
        for url, result in results.items():
            if result is None:
                self._members[url].asleep = _ALL_MEMORY

    async def _wake(self, urls: Sequence[str], memory: frozenset[str]) -> None:
        """Make engines allocate again the parts of `memory` that they have freed."""
        for url in urls:
            member = self._members[url]
            if tags := member.asleep & memory:
                try:
                    await member.client.resume_memory(sorted(tags))
                    member.asleep -= tags
                except EngineError as error:
                    self._membership.leave(url, error.reason)

    # ---- closing and helpers ----

    def close(self) -> None:
        """Disconnect from the engines, which keep running."""
        if self._thread.loop.is_closed():
            return
        self._thread.run(self._close(), 2 * _CALL_TIMEOUT_S)
        self._thread.close()
        if self._registry:
            self._registry.close()

    async def _close(self) -> None:
        if self._reserved:
            self._reserved.end("the run ends")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CALL_TIMEOUT_S), self._reserving:
                pass
        await self._wake(list(self._members), _ALL_MEMORY)
        await self._membership.close()


async def _fall_asleep(client: EngineClient) -> None:
    """Free all memory of an idle engine. A busy engine would die; flush_cache fails first if it is busy."""
    await client.abort(all=True)
    while True:
        try:
            await client.flush_cache()
            break
        except EngineRefused:
            await asyncio.sleep(_POLL_S)
    await client.release_memory()
