"""Measures how long engines in use have nothing to do."""

from __future__ import annotations

from collections.abc import Iterable


class IdleTime:
    """The time during which one engine has no call. All times are seconds of one clock."""

    def __init__(self, now: float) -> None:
        self._counted_since = now
        self._idle_since: float | None = now
        self._idle_s = 0.0

    def begin_work(self, now: float) -> None:
        """The engine has a call; no more than that if it had some before."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def end_work(self, now: float) -> None:
        """The engine's last call has ended."""
        self._idle_since = now

    def pop(self, now: float) -> tuple[float, float]:
        """How long the engine was idle since the last call, and how long that is ago."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = now
        found = self._idle_s, now - self._counted_since
        self._idle_s, self._counted_since = 0.0, now
        return found


def idle_share(engines: Iterable[IdleTime], now: float) -> float | None:
    """The share of the engines' time since the last call in which they were idle; None if there are none."""
    popped = [engine.pop(now) for engine in engines]
    total = sum(of_all for _, of_all in popped)
    return sum(idle for idle, _ in popped) / total if total else None
