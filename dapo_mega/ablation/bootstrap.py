"""Percentile bootstrap of a mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_RESAMPLES = 20_000
_LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; without one where a single value was given."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool | None:
        """Whether the interval does; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


def estimate_mean(values: Sequence[float]) -> Estimate:
    """The mean, and the interval that holds the middle 95 % of the means of resamples with replacement.

    The resamples are the same for every call of as many values. Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values to average")
    data = np.asarray(values, dtype=np.float64)
    if len(data) == 1:
        return Estimate(float(data[0]))
    rng = np.random.Generator(np.random.PCG64(0))
    means = data[rng.integers(len(data), size=(_NUM_RESAMPLES, len(data)))].mean(axis=1)
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail], method="inverted_cdf")
    return Estimate(float(data.mean()), float(low), float(high))
