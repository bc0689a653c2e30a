"""Measures how long engines in use have nothing to do, and how many calls they have while they work."""

from __future__ import annotations

from collections.abc import Iterable


class EngineLoad:
    """The calls of one engine over time. All times are seconds of one clock."""

    def __init__(self, now: float) -> None:
        self._counted_since = self._changed = now
        self._num_calls = 0
        self._idle_s = self._call_s = 0.0

    def change(self, num_calls: int, now: float) -> None:
        """From now on the engine has so many calls."""
        passed = now - self._changed
        self._call_s += passed * self._num_calls
        self._idle_s += passed if self._num_calls == 0 else 0.0
        self._changed, self._num_calls = now, num_calls

    def pop(self, now: float) -> tuple[float, float, float]:
        """Since the last call: the seconds in use, those of them without a call, and the sum of the calls' seconds."""
        self.change(self._num_calls, now)
        found = now - self._counted_since, self._idle_s, self._call_s
        self._idle_s, self._call_s, self._counted_since = 0.0, 0.0, now
        return found


def load_metrics(engines: Iterable[EngineLoad], now: float) -> dict[str, float]:
    """Of the engines' time since the last call: the share in which they were idle, and the mean number of calls of an
    engine in the rest. Without engines there are none, without any call there is no mean."""
    total, idle, in_calls = map(sum, zip((0.0,) * 3, *(engine.pop(now) for engine in engines), strict=True))
    metrics = {"fleet/idle_share": idle / total} if total else {}
    if total > idle:
        metrics["fleet/requests_at_work"] = in_calls / (total - idle)
    return metrics
