"""When simulated engines die and come back."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Failures:
    """Each engine dies `per_hour` times in an hour of work, at random, and answers again after `restart_s` seconds; the
    weights that it then needs take `weights_s`. With `keeps_parts` a response loses what its engine decoded since the
    last update, else everything."""

    per_hour: float
    restart_s: float
    weights_s: float
    keeps_parts: bool
    seed: int = 0


class FailureTimes:
    """The failures and returns of `num_engines` engines in the order of their times, in seconds."""

    def __init__(self, failures: Failures | None, num_engines: int) -> None:
        self._failures = failures
        self._random = np.random.default_rng((failures.seed if failures else 0, 2))
        self._is_down = [False] * num_engines
        self._times = [(self.until_failure(), number) for number in range(num_engines)] if failures else []
        heapq.heapify(self._times)

    @property
    def next_at(self) -> float:
        """When the next engine fails or returns."""
        return self._times[0][0] if self._times else math.inf

    @property
    def keeps_parts(self) -> bool:
        return self._failures is not None and self._failures.keeps_parts

    @property
    def weights_s(self) -> float:
        return self._failures.weights_s if self._failures else 0.0

    def pop(self, now: float) -> tuple[float, int, bool]:
        """(time, engine, whether it fails) of the next failure or return. What follows it is counted from then, or from
        `now` if that is later."""
        assert self._failures
        time, number = heapq.heappop(self._times)
        self._is_down[number] = not self._is_down[number]
        lasts = self._failures.restart_s if self._is_down[number] else self.until_failure()
        heapq.heappush(self._times, (max(time, now) + lasts, number))
        return time, number, self._is_down[number]

    def until_failure(self) -> float:
        """Seconds that an engine works, drawn at random."""
        assert self._failures
        return float(self._random.exponential(3600 / self._failures.per_hour))
