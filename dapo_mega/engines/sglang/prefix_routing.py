"""Which engine a request goes to: the one that has its prompt's prefix already, or else the least loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_mega.engines.sglang.engine_client import EngineClient

_FAILURES_BEFORE_PAUSE = 3
_MAX_PAUSE_S = 30.0
_SPEED_MEMORY = 0.95
_MIN_ANSWERS_FOR_SPEED = 8


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's load and work so far. `tokens_per_s` is what one response gets, None before it is known."""

    url: str
    version: int
    in_flight: int
    finished: int
    tokens: int
    tokens_per_s: float | None


@dataclass(eq=False)
class EngineSlot:
    """An engine in use and how it has done. It is given nothing before `paused_until`, a time of the event loop."""

    client: EngineClient
    version: int
    in_flight: int = 0
    paused_until: float = 0.0
    _finished: int = 0
    _tokens: int = 0
    _recent_tokens: float = 0.0
    _recent_seconds: float = 0.0
    _failures_in_row: int = 0
    _pauses_in_row: int = 0

    @property
    def url(self) -> str:
        return self.client.url

    def snapshot(self) -> EngineSnapshot:
        speed = self._recent_tokens / max(self._recent_seconds, 1e-9)
        known = self._finished >= _MIN_ANSWERS_FOR_SPEED
        return EngineSnapshot(
            self.url, self.version, self.in_flight, self._finished, self._tokens, speed if known else None
        )

    def succeeded(self, num_tokens: int, seconds: float) -> None:
        """A call brought this many tokens in this time."""
        self._failures_in_row = self._pauses_in_row = 0
        self._finished += 1
        self._tokens += num_tokens
        self._recent_tokens = _SPEED_MEMORY * self._recent_tokens + num_tokens
        self._recent_seconds = _SPEED_MEMORY * self._recent_seconds + seconds

    def failed(self, now: float, first_pause_s: float, is_unreachable: bool) -> float | None:
        """A call failed. Returns the seconds that the engine pauses when it fails again and again: by failing fast it
        would draw all requests."""
        self._failures_in_row += 1
        if now < self.paused_until or not (is_unreachable or self._failures_in_row >= _FAILURES_BEFORE_PAUSE):
            return None
        pause = min(first_pause_s * 2.0**self._pauses_in_row, _MAX_PAUSE_S)
        self._pauses_in_row += 1
        self.paused_until = now + pause
        return pause


@dataclass(eq=False)
class _Home:
    """The engine that has a prompt's prefix, while `num_requests` requests have that prompt."""

    url: str = ""
    num_requests: int = 0


class EngineRouter:
    """Keeps requests with the same prompt together as long as that is not unfair to them."""

    def __init__(self, requests_per_engine: int) -> None:
        """At most `requests_per_engine` are in flight on one engine."""
        self._capacity = requests_per_engine
        # So much fuller than the least loaded engine may the one that has the prefix be.
        self._slack = max(1, requests_per_engine // 8)
        self._homes: dict[bytes, _Home] = {}

    def enter(self, prompt: bytes) -> None:
        """A request with this prompt is open from now on."""
        self._homes.setdefault(prompt, _Home()).num_requests += 1

    def leave(self, prompt: bytes) -> None:
        """A request with this prompt has ended."""
        home = self._homes[prompt]
        home.num_requests -= 1
        if not home.num_requests:
            del self._homes[prompt]

    def settle(self, prompt: bytes, slot: EngineSlot) -> None:
        """A request with this prompt goes to this engine."""
        self._homes[prompt].url = slot.url

    def has_room(self, slot: EngineSlot, now: float) -> bool:
        return slot.in_flight < self._capacity and slot.paused_until <= now

    def choose(self, slots: Sequence[EngineSlot], prompt: bytes) -> EngineSlot | None:
        """One of `slots`, all of which have room; None when there are none."""
        if not slots:
            return None
        least = min(slots, key=lambda slot: slot.in_flight)
        home = self._homes[prompt].url
        for slot in slots:
            if slot.url == home and slot.in_flight <= least.in_flight + self._slack:
                return slot
        return least
