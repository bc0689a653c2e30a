"""Rank 0's side of a fleet of SGLang engines: who is there, which weights they hold, what they are asked.

An engine passes through these states::

    joining -> stale -> serving          answers probes -> its settings fit -> holds the current weights
       ^         |         |
       +------ away <------+             dead or hung: its work moves to others at once

Only engines that serve are asked anything, so none answers with weights of its own. Members change on the event loop
only; the public methods are for the main thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

from dapo_mega.config import RunConfig
from dapo_mega.errors import FleetError
from dapo_mega.rollout.dispatcher import Dispatcher
from dapo_mega.rollout.engine_client import EngineClient, EngineError, EngineInfo
from dapo_mega.rollout.event_loop import LoopThread
from dapo_mega.rollout.health import HealthMonitor
from dapo_mega.rollout.registry import EngineRegistry, Registration
from dapo_mega.types import Answer, GenerationRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.1
_UPKEEP_S = 1.0
_CALL_TIMEOUT_S = 60.0
_MAX_FAILED_UPDATES = 3
_NAMES_OF_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

State = Literal["joining", "stale", "serving", "away", "refused"]


@dataclass
class Member:
    """One engine as rank 0 knows it. `version` is that of its weights; -1 when they are not the run's."""

    client: EngineClient
    instance: str = ""
    state: State = "joining"
    info: EngineInfo | None = None
    version: int = -1
    reason: str = ""
    is_asleep: bool = False
    failed_updates: int = 0


@dataclass(frozen=True)
class SyncTarget:
    """An engine that is to get weights; `tp_size` of its processes receive them."""

    url: str
    tp_size: int


class FleetDriver:
    """Drives all engines of a run over HTTP, from an event loop in a thread of its own."""

    def __init__(self, config: RunConfig, vocab_size: int, api_key: str) -> None:
        """`vocab_size` bounds the token ids that are sent. Raises InputError when rollout.fleet.rendezvous is taken."""
        self._config = config
        self._fleet = config.rollout.fleet
        self._vocab_size = vocab_size
        self._api_key = api_key
        self._members: dict[str, Member] = {}
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._registry = EngineRegistry(self._fleet.rendezvous, api_key) if self._fleet.rendezvous else None
        self._thread = LoopThread("rollout-fleet")
        self._dispatcher, self._monitor = self._thread.run(self._start())

    async def _start(self) -> tuple[Dispatcher, HealthMonitor]:
        dispatcher = Dispatcher(
            vocab_size=self._vocab_size,
            requests_per_engine=self._fleet.requests_per_engine,
            request_timeout_s=self._fleet.request_timeout_s,
            max_attempts=self._config.rollout.max_attempts,
            on_answer=self._answers.put,
            on_trouble=lambda url: self._monitor.check_now(url),
            seed=self._config.seed,
        )
        monitor = HealthMonitor(
            heartbeat_s=self._fleet.heartbeat_s,
            hung_after_s=self._fleet.hung_after_s,
            on_change=self._changed,
            speeds=dispatcher.speeds,
        )
        for url in self._fleet.urls:
            self._watch(monitor, url, instance="")
        self._upkeep = asyncio.create_task(self._keep_up(monitor))
        self._upkeep.add_done_callback(_report_fault)
        return dispatcher, monitor

    # ---- membership, on the event loop ----

    async def _keep_up(self, monitor: HealthMonitor) -> None:
        """Take up engines that register, and those that are healthy again after an update that failed."""
        while True:
            if self._registry:
                await self._follow(self._registry.poll(), monitor)
            for url, health in monitor.engines().items():
                if health.state in ("healthy", "slow") and self._members[url].state == "away":
                    await self._join(url)
            await asyncio.sleep(min(self._fleet.heartbeat_s, _UPKEEP_S))

    async def _follow(self, registrations: Sequence[Registration], monitor: HealthMonitor) -> None:
        for registration in registrations:
            known = self._members.get(registration.url)
            if known is None:
                logger.info("engine %s has registered", registration.url)
                self._watch(monitor, registration.url, registration.instance)
            elif known.instance != registration.instance:
                known.instance = registration.instance
                self._leave(registration.url, "it was started anew")

    def _watch(self, monitor: HealthMonitor, url: str, instance: str) -> None:
        client = EngineClient(url, self._api_key, timeout_s=self._config.weight_sync.timeout_s)
        self._members[url] = Member(client, instance)
        monitor.watch(client)

    async def _changed(self, url: str, old: str, new: str, reason: str) -> None:
        """The monitor's verdict on an engine has changed."""
        if new in ("dead", "hung"):
            self._counts[f"engines_{new}"] += 1
            self._leave(url, f"{new}: {reason}")
        elif new == "slow":
            logger.warning("WARNING: engine %s is slow: %s", url, reason)
        elif new == "healthy" and old != "slow":
            await self._join(url)

    def _leave(self, url: str, reason: str) -> None:
        member = self._members[url]
        if member.state == "serving":
            self._dispatcher.remove_engine(url, reason)
        if member.state in ("serving", "stale"):
            logger.warning("WARNING: engine %s has left the fleet (%s); its work moves to the others", url, reason)
        member.state, member.version, member.reason, member.is_asleep = "away", -1, reason, False

    async def _join(self, url: str) -> None:
        """Check the engine's settings and undo what a trainer that is gone may have left in it."""
        member = self._members[url]
        member.state = "joining"
        state: State = "stale"
        reason = ""
        try:
            member.info = await member.client.info()
            if reason := _misfit(member.info, self._config, self._vocab_size):
                state = "refused"
            else:
                await member.client.resume()
                await member.client.abort(all=True)
        except EngineError as error:
            state, reason = "away", str(error)
        if member.state != "joining":
            return  # It left meanwhile, or has been taken up already.
        member.state, member.version, member.reason = state, -1, reason
        if state == "stale":
            self._counts["engines_joined"] += 1
            logger.info("engine %s is ready for weights", url)
        elif state == "refused":
            logger.warning("WARNING: engine %s is refused: %s", url, reason)

    # ---- generation, from the main thread ----

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take the requests on and return at once."""
        self._on_loop(lambda: self._dispatcher.submit(requests))

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Give up requests in flight."""
        self._on_loop(lambda: self._dispatcher.cancel(request_ids))

    def next_answer(self, timeout_s: float) -> Answer | None:
        """The next finished request; None when there is none within the time."""
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def num_serving(self) -> int:
        return sum(member.state == "serving" for member in self._members.values())

    def has_stale(self) -> bool:
        """Whether engines wait for the current weights."""
        return any(member.state == "stale" for member in list(self._members.values()))

    def pop_metrics(self) -> dict[str, float]:
        """Counters since the last call, by metric name."""
        counts, self._counts = self._counts, Counter()
        states = Counter(member.state for member in list(self._members.values()))
        return {
            "fleet/engines_serving": float(states["serving"]),
            "fleet/engines_away": float(states["away"]),
            **{f"fleet/{name}": float(counts[name]) for name in ("engines_dead", "engines_hung", "engines_joined")},
            **self._on_loop(lambda: {**self._monitor.metrics(), **self._dispatcher.pop_metrics()}),
        }

    # ---- weight updates, from the main thread ----

    def targets(self, only_stale: bool) -> list[SyncTarget]:
        """The engines that can be updated, once at least `min_engines` are there.

        Says when the run pauses for want of engines and when it goes on. Raises FleetError after `wait_limit_s`, or
        when every engine that is there does not fit the run.
        """
        self.wait_for_engines()
        wanted = ("stale",) if only_stale else ("stale", "serving")
        chosen = [(url, member) for url, member in list(self._members.items()) if member.state in wanted]
        return [SyncTarget(url, member.info.tp_size) for url, member in chosen if member.info]

    def wait_for_engines(self) -> None:
        """Return when at least `min_engines` are reachable; see `targets`."""
        started = time.monotonic()
        is_paused = False
        while (present := self._num_reachable()) < self._fleet.min_engines:
            self._refuse_misfits()
            waited = time.monotonic() - started
            if waited > self._fleet.wait_limit_s:
                raise FleetError(
                    f"{present} of at least {self._fleet.min_engines} engines (rollout.fleet.min_engines) are there "
                    f"after {waited:.0f} s ({self._describe()}); see their logs, start engines with "
                    f"launch/serve_rollouts.py, and start the run again: it continues from its last checkpoint"
                )
            if not is_paused and waited > self._fleet.heartbeat_s:
                is_paused = True
                self._counts["pauses"] += 1
                logger.warning(
                    "WARNING: the run pauses: %d of at least %d engines are there (%s); it goes on when they return",
                    present,
                    self._fleet.min_engines,
                    self._describe(),
                )
            time.sleep(_POLL_S)
        if is_paused:
            logger.warning("the run goes on with %d engines", present)

    def _num_reachable(self) -> int:
        return sum(member.state in ("stale", "serving") for member in list(self._members.values()))

    def _refuse_misfits(self) -> None:
        members = dict(self._members)
        misfits = [f"{url}: {member.reason}" for url, member in members.items() if member.state == "refused"]
        if misfits and len(misfits) == len(members):
            raise FleetError(f"no engine fits the run: {'; '.join(misfits)}")

    def _describe(self) -> str:
        members = dict(self._members)
        if not members:
            return "none has registered"
        return "; ".join(f"{url} {m.state}{f', {m.reason}' if m.reason else ''}" for url, m in members.items())

    def start_call(
        self, targets: Sequence[SyncTarget], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> Future[dict[str, T | EngineError]]:
        """Begin a call on all targets at once; the future gives result or error by URL."""
        return self._thread.start(self._call(targets, method, timeout_s))

    def call(
        self, targets: Sequence[SyncTarget], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> dict[str, T | EngineError]:
        """`start_call` and wait."""
        return self.start_call(targets, method, timeout_s).result()

    async def _call(
        self, targets: Sequence[SyncTarget], method: Callable[[EngineClient], Awaitable[T]], timeout_s: float
    ) -> dict[str, T | EngineError]:
        async def one(url: str) -> T | EngineError:
            try:
                async with asyncio.timeout(timeout_s):
                    return await method(self._members[url].client)
            except EngineError as error:
                return error
            except TimeoutError:
                return EngineError(url, f"no answer within {timeout_s:g} s")

        results = await asyncio.gather(*(one(target.url) for target in targets))
        return {target.url: result for target, result in zip(targets, results, strict=True)}

    def hold(self, targets: Sequence[SyncTarget]) -> None:
        """Start nothing more on the targets, and let what is in flight finish or pause as configured."""
        self._thread.run(self._hold([target.url for target in targets]))

    async def _hold(self, urls: Sequence[str]) -> None:
        serving = [url for url in urls if self._members[url].state == "serving"]
        if serving:
            await self._settle(serving)
        # Until here an engine that hangs must be found out; from here on none can answer probes.
        for url in urls:
            await self._monitor.suspend(url)
        await self._wake(urls, ("weights",))

    async def _settle(self, urls: Sequence[str]) -> None:
        sync = self._config.weight_sync
        self._dispatcher.hold()
        if sync.in_flight == "finish":
            await self._dispatcher.drain()
            return
        targets = [SyncTarget(url, 1) for url in urls]
        await self._call(targets, lambda client: client.pause(sync.pause), sync.timeout_s)
        if sync.pause == "abort":
            await self._dispatcher.take_back()

    def release(self, targets: Sequence[SyncTarget]) -> None:
        """Undo `hold`."""
        self._thread.run(self._release([target.url for target in targets]))

    async def _release(self, urls: Sequence[str]) -> None:
        await self._wake(urls, ("kv_cache", "cuda_graph"))
        present = [SyncTarget(url, 1) for url in urls if self._members[url].state in ("stale", "serving")]
        await self._call(present, lambda client: client.resume(), _CALL_TIMEOUT_S)
        for url in urls:
            self._members[url].is_asleep = False
            self._monitor.resume(url)
        self._dispatcher.resume()

    def synced(self, url: str, version: int) -> None:
        """The engine holds these weights now, and serves."""
        self._on_loop(lambda: self._synced(url, version))

    def _synced(self, url: str, version: int) -> None:
        member = self._members[url]
        if member.state == "stale":
            self._dispatcher.add_engine(member.client, version)
        elif member.state == "serving":
            self._dispatcher.set_version(url, version)
        else:
            return
        member.state, member.version, member.failed_updates = "serving", version, 0

    def failed(self, url: str, reason: str) -> None:
        """The engine did not take the weights: it leaves the fleet until it answers probes again."""
        self._on_loop(lambda: self._failed(url, reason))

    def _failed(self, url: str, reason: str) -> None:
        member = self._members[url]
        self._counts["failed_updates"] += 1
        self._leave(url, reason)
        member.failed_updates += 1
        if member.failed_updates == _MAX_FAILED_UPDATES:
            member.state, member.reason = "refused", f"{_MAX_FAILED_UPDATES} updates in a row failed, lastly: {reason}"
            logger.warning("WARNING: engine %s is refused: %s", url, member.reason)

    # ---- colocated engines, from the main thread ----

    def sleep(self) -> None:
        """Free the memory of colocated engines, weights included, until the next update."""
        if self._config.rollout.placement == "colocated":
            self._thread.run(self._sleep())

    async def _sleep(self) -> None:
        urls = [url for url, member in self._members.items() if member.state == "serving"]
        for url in urls:
            await self._monitor.suspend(url)
        self._dispatcher.hold()
        await self._dispatcher.drain()

        async def fall_asleep(client: EngineClient) -> None:
            # The engine dies when it is not idle, and refuses to flush its cache while it is not.
            await client.flush_cache()
            await client.release_memory()

        results = await self._call([SyncTarget(url, 1) for url in urls], fall_asleep, _CALL_TIMEOUT_S)
        for url, result in results.items():
            if isinstance(result, EngineError):
                self._leave(url, str(result))
            else:
                self._members[url].is_asleep = True

    async def _wake(self, urls: Sequence[str], tags: Sequence[str]) -> None:
        asleep = [SyncTarget(url, 1) for url in urls if self._members[url].is_asleep]
        results = await self._call(asleep, lambda client: client.resume_memory(list(tags)), _CALL_TIMEOUT_S)
        for url, result in results.items():
            if isinstance(result, EngineError):
                self._leave(url, str(result))

    # ---- the rest ----

    def close(self) -> None:
        """Leave the engines running and let go of everything here."""
        if self._thread.loop.is_closed():
            return
        self._thread.run(self._close(), _CALL_TIMEOUT_S)
        self._thread.close()
        if self._registry:
            self._registry.close()

    async def _close(self) -> None:
        self._upkeep.cancel()
        await self._monitor.close()
        await self._dispatcher.close()
        for member in self._members.values():
            await member.client.close()

    def _on_loop(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self._thread.run(call(), _CALL_TIMEOUT_S)


def _report_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()):
        logger.critical("engines are not taken up any more: %r", fault, exc_info=fault)


def _misfit(info: EngineInfo, config: RunConfig, vocab_size: int) -> str:
    """Why the engine cannot serve this run; empty when it can."""
    if info.vocab_size not in (None, vocab_size):
        return f"its model has a vocabulary of {info.vocab_size} tokens and the policy one of {vocab_size}"
    wanted = config.engine_dtype
    if wanted == "fp8":
        if info.quantization != "fp8":
            return "it is not quantized to fp8 but rollout.dtype=fp8; start it with --quantization fp8"
    elif info.dtype not in (wanted, _NAMES_OF_DTYPES[wanted]):
        return (
            f"it computes in {info.dtype} but the run expects {_NAMES_OF_DTYPES[wanted]}; start it with --dtype "
            f"{_NAMES_OF_DTYPES[wanted]}, or set rollout.dtype"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if info.context_length is not None and info.context_length < longest:
        return (
            f"its context of {info.context_length} tokens is shorter than data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}; start it with --context-length {longest}"
        )
    sync = config.weight_sync
    if sync.in_flight == "continue" and sync.pause == "in_place" and not info.disable_radix_cache:
        return (
            "its prefix cache would keep entries of old weights under weight_sync.pause=in_place; start it with "
            "--disable-radix-cache, or use pause=retract or abort"
        )
    return ""
