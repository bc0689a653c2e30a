"""Probes engines and tells apart which are starting, healthy, hung, dead or no SGLang server.

::

    starting -> healthy                 answers probes
        ^          |
        |          +-----> hung         connected, but no answer for `hung_after_s`
        +-- dead <-+                    no connection, twice in a row
        +- foreign <                    what answers is no SGLang server

Foreign, hung and dead engines are still probed, and become `healthy` when they answer. A paused engine answers no
probe, and a trainer that was killed may have left one paused: engines that are not in use are resumed before each
probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from dapo_mega.engines.sglang.engine_client import (
    EngineClient,
    EngineDisconnected,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    is_no_engine,
)
from dapo_mega.engines.sglang.event_loop import report_fault

logger = logging.getLogger(__name__)

State = Literal["starting", "healthy", "hung", "dead", "foreign"]
OnChange = Callable[[str, State, State, str], Awaitable[None]]

_SECOND_LOOK_S = 0.2
_NUM_LATENCIES = 3


@dataclass(eq=False)
class Watch:
    """The probes of an engine, and the latest verdict on it: its `state` since `changed`. `last_answer` is the time of
    its last answer, or of the first probe. `restarts` counts new processes behind its URL. When `wanted` is set, it is
    probed at once, without waiting for the next heartbeat."""

    client: EngineClient
    last_answer: float
    changed: float
    state: State = "starting"
    reason: str = "not probed yet"
    process: str = ""
    restarts: int = 0
    failed_connections: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_LATENCIES))
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    probe: asyncio.Task[None] | None = None
    loop: asyncio.Task[None] | None = None

    @property
    def latency_s(self) -> float | None:
        """The median of the last probes, so that one late answer does not count; None before enough answers."""
        return statistics.median(self.latencies) if len(self.latencies) == _NUM_LATENCIES else None

    @property
    def state_s(self) -> float:
        """How old the verdict is."""
        return time.monotonic() - self.changed

    @property
    def silence_s(self) -> float:
        """The time since the last answer."""
        return time.monotonic() - self.last_answer


class HealthMonitor:
    """Probes every watched engine, whose `watches` are by URL; made and used on one running event loop."""

    def __init__(
        self,
        *,
        heartbeat_s: float,
        hung_after_s: float,
        on_change: OnChange,
        on_fault: Callable[[asyncio.Task[None]], None] = report_fault,
    ) -> None:
        """`on_change(url, old, new, reason)` is awaited on each change of an engine's state, before its next probe.
        `on_fault` is the done-callback of the tasks that probe, which end only with a fault."""
        self._heartbeat_s = heartbeat_s
        self._hung_after_s = hung_after_s
        self._on_change = on_change
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self.watches: dict[str, Watch] = {}

    def watch(self, client: EngineClient) -> None:
        """Probe this engine from now on."""
        assert client.url not in self.watches
        watch = self.watches[client.url] = Watch(client, time.monotonic(), time.monotonic())
        watch.probed.set()
        watch.loop = self._loop.create_task(self._watch(watch), name=f"probing {client.url}")
        watch.loop.add_done_callback(self._on_fault)

    async def suspend(self, url: str) -> None:
        """Ignore the engine until `resume`: it cannot answer during an update or while its memory is freed."""
        watch = self.watches[url]
        watch.probed.clear()
        if watch.probe:
            watch.probe.cancel()
            await asyncio.wait([watch.probe])

    def resume(self, url: str) -> None:
        """Judge the engine again, by its answers from now on."""
        watch = self.watches[url]
        watch.last_answer = time.monotonic()
        watch.failed_connections = 0
        watch.probed.set()

    def metrics(self) -> dict[str, float]:
        """The number of healthy engines, the slowest engine's probe, and how many times the median probe it takes."""
        watches = self.watches.values()
        latencies = [watch.latency_s for watch in watches if watch.latency_s is not None]
        return {
            "fleet/engines_healthy": float(sum(watch.state == "healthy" for watch in watches)),
            "fleet/probe_latency_max_s": max(latencies, default=0.0),
            "fleet/slowest_probe_ratio": max(latencies) / max(statistics.median(latencies), 1e-9) if latencies else 1.0,
        }

    async def close(self) -> None:
        tasks = [task for watch in self.watches.values() for task in (watch.loop, watch.probe) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, watch: Watch) -> None:
        while True:
            await watch.probed.wait()
            watch.wanted.clear()
            started = time.monotonic()
            # The time until the engine's silence makes it hung; the full limit for an engine that is hung already.
            limit_s = self._hung_after_s - watch.silence_s
            limit_s = limit_s if limit_s > self._heartbeat_s else self._hung_after_s
            watch.probe = self._loop.create_task(_probe(watch.client, watch.state, limit_s))
            await asyncio.wait([watch.probe])
            if watch.probed.is_set() and not watch.probe.cancelled():
                await self._judge(watch, watch.probe.exception(), time.monotonic() - started)
            pause = _SECOND_LOOK_S if watch.failed_connections == 1 else self._heartbeat_s
            pause = max(started + pause - time.monotonic(), min(_SECOND_LOOK_S, self._heartbeat_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await watch.wanted.wait()

    async def _judge(self, watch: Watch, error: BaseException | None, seconds: float) -> None:
        is_gone = isinstance(error, EngineUnreachable | EngineDisconnected)
        is_busy = isinstance(error, EngineRefused) and error.status == HTTPStatus.SERVICE_UNAVAILABLE
        watch.failed_connections = watch.failed_connections + 1 if is_gone else 0
        if error is None:
            watch.last_answer = time.monotonic()
            watch.latencies.append(seconds)
            if watch.state != "healthy":
                await self._change(watch, "healthy", await self._arrival(watch))
        elif is_gone:
            if watch.failed_connections > 1:
                await self._change(watch, "dead", str(error))
        elif is_busy and watch.state in ("starting", "dead", "foreign"):
            await self._change(watch, "starting", "the server is loading")
        elif is_no_engine(error) or not isinstance(error, EngineError):
            await self._change(watch, "foreign", str(error))
        elif time.monotonic() - watch.last_answer >= self._hung_after_s:
            await self._change(watch, "hung", f"no healthy answer for {self._hung_after_s:g} s; lastly {error}")

    async def _arrival(self, watch: Watch) -> str:
        """Whether the answering engine is the same process as before, as text."""
        known = watch.process
        try:
            watch.process = (await watch.client.info()).process
        except EngineError as error:
            return f"it answers; which process it is cannot be told: {error}"
        if not known:
            return "it answers"
        is_new = watch.process != known
        watch.restarts += is_new
        return f"it answers again, and is {'a new' if is_new else 'the same'} process"

    async def _change(self, watch: Watch, new: State, reason: str) -> None:
        old, watch.state, watch.reason = watch.state, new, reason
        if old != new:
            watch.changed = time.monotonic()
            logger.debug("engine %s was %s and is %s: %s", watch.client.url, old, new, reason)
            await self._on_change(watch.client.url, old, new, reason)


async def _probe(client: EngineClient, state: State, timeout_s: float) -> None:
    """Return once the engine has generated a token. Raises EngineError."""
    if state != "healthy":
        with contextlib.suppress(EngineRefused):
            await client.resume(timeout_s)
    await client.probe(timeout_s)
