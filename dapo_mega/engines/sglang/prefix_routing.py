"""Routes each request to the engine that has its prompt, or the turns before it, in the prefix cache, or else to the
least loaded one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.metrics.timeline import LoadHistory

_FAILURES_BEFORE_PAUSE = 3
_MAX_PAUSE_S = 30.0
_MOST_ABORTS = 64
_IN_FLIGHT = attrgetter("in_flight")


@dataclass(eq=False)
class EngineSlot:
    """An engine in use and its record. It gets no request before `paused_until`, a time of the event loop.
    `history` is what its URL had in flight, also when it was in use before. Few calls are aborted at a time, as each
    abort opens a connection."""

    client: EngineClient
    version: int
    history: LoadHistory
    url: str = field(init=False)
    in_flight: int = 0
    paused_until: float = 0.0
    aborting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_ABORTS))
    _failures_in_row: int = 0
    _pauses_in_row: int = 0
    _counted: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        self.url = self.client.url

    def change_calls(self, by: int, now: float) -> None:
        """Calls begin or end."""
        self.in_flight += by
        self.history.change(now, by)

    def pop_load(self, now: float) -> tuple[float, float, float]:
        """Since the last call: the seconds in use, those of them with any call, and the sum of the calls' seconds."""
        self.history.change(now, 0)
        before, self._counted = self._counted, (now, self.history.busy_s, self.history.open_s)
        in_use_s, busy_s, open_s = (new - old for new, old in zip(self._counted, before, strict=True))
        return in_use_s, busy_s, open_s

    def succeeded(self) -> None:
        """A call was answered: what failed before no longer counts."""
        self._failures_in_row = self._pauses_in_row = 0

    def failed(self, now: float, first_pause_s: float, is_unreachable: bool) -> float | None:
        """Count a failed call. Returns for how many seconds the engine pauses after repeated failures, else None: an
        engine that fails fast would attract all requests."""
        self._failures_in_row += 1
        if now < self.paused_until or not (is_unreachable or self._failures_in_row >= _FAILURES_BEFORE_PAUSE):
            return None
        pause = min(first_pause_s * 2.0**self._pauses_in_row, _MAX_PAUSE_S)
        self._pauses_in_row += 1
        self.paused_until = now + pause
        return pause


def load_metrics(engines: Iterable[EngineSlot], now: float) -> dict[str, float]:
    """Of the engines' time since the last call: the share in which they were idle, and the mean number of calls of an
    engine in the rest. Without engines there are none, without any call there is no mean."""
    total, busy, in_calls = map(sum, zip((0.0,) * 3, *(engine.pop_load(now) for engine in engines), strict=True))
    metrics = {"fleet/idle_share": max(1 - busy / total, 0.0)} if total else {}
    if busy:
        metrics["fleet/requests_at_work"] = in_calls / busy
    return metrics


class EngineRouter:
    """Sends requests with the same prompt, and those that go on behind a turn, to the same engine unless that engine is
    clearly fuller."""

    def __init__(self, requests_per_engine: int) -> None:
        """`requests_per_engine` limits the calls in flight on one engine."""
        self._capacity = requests_per_engine
        # The engine with the prefix may have this many calls more than the least loaded engine.
        self._slack = max(1, requests_per_engine // 8)
        self._num_open: Counter[bytes] = Counter()
        self.holders: dict[bytes, str] = {}  # The URL of the engine whose cache has the prompt.

    def enter(self, prompt: bytes) -> None:
        """Count a new open request with this prompt."""
        self._num_open[prompt] += 1

    def leave(self, prompt: bytes) -> None:
        """Count the end of a request with this prompt."""
        self._num_open[prompt] -= 1
        if not self._num_open[prompt]:
            del self._num_open[prompt]
            self.holders.pop(prompt, None)

    def has_room(self, slot: EngineSlot, now: float) -> bool:
        return slot.in_flight < self._capacity and slot.paused_until <= now

    def choose(self, slots: Sequence[EngineSlot], prompt: bytes, before: str = "") -> EngineSlot | None:
        """The best of `slots`, all of which have room; None if `slots` is empty. `before` is the URL of the engine of
        the turn before."""
        least = min(slots, key=_IN_FLIGHT, default=None)
        if least and (url := self.holders.get(prompt, before)):
            holder = next((slot for slot in slots if slot.url == url), least)
            return holder if holder.in_flight - self._slack <= least.in_flight else least
        return least
