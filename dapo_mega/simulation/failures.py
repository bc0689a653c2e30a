"""When simulated engines die and come back."""

import heapq
import math

import numpy as np


class FailureTimes:
    """The failures and returns of `num_engines` engines in the order of their times, in seconds."""

    def __init__(
        self,
        num_engines: int,
        per_hour: float = 0.0,
        restart_s: float = 0.0,
        weights_s: float = 0.0,
        *,
        keeps_parts: bool = False,
        seed: int = 0,
    ) -> None:
        """Each engine dies `per_hour` times in an hour of work, at random, and answers again after `restart_s` seconds;
        the weights that it then needs take `weights_s`. With `keeps_parts` a response loses what its engine decoded
        since the last update, else everything."""
        self.weights_s = weights_s
        self.keeps_parts = keeps_parts
        self._per_hour = per_hour
        self._restart_s = restart_s
        self._random = np.random.default_rng((seed, 2))
        self._is_down = [False] * num_engines
        self._times = [(self.until_failure(), number) for number in range(num_engines)]
        heapq.heapify(self._times)

    @property
    def next_at(self) -> float:
        """When the next engine fails or returns; infinity if none ever does."""
        return self._times[0][0]

    def pop(self, now: float) -> tuple[float, int, bool]:
        """(time, engine, whether it fails) of the next failure or return. What follows it is counted from then, or from
        `now` if that is later."""
        time, number = heapq.heappop(self._times)
        self._is_down[number] = not self._is_down[number]
        lasts = self._restart_s if self._is_down[number] else self.until_failure()
        heapq.heappush(self._times, (max(time, now) + lasts, number))
        return time, number, self._is_down[number]

    def until_failure(self) -> float:
        """Seconds that an engine works, drawn at random."""
        return float(self._random.exponential(3600 / self._per_hour)) if self._per_hour else math.inf
