"""Histograms with bins of equal width, which add up over processes."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

NUM_BINS = 64


@dataclass(frozen=True)
class Histogram:
    """How many values lie in each of `len(counts)` bins of equal width between `low` and `high`."""

    low: float
    high: float
    counts: tuple[int, ...]

    @classmethod
    def of_values(cls, values: npt.ArrayLike, num_bins: int = NUM_BINS) -> Self | None:
        """The histogram of the finite values, from the smallest to the largest of them; None if there are none."""
        array = np.asarray(values, dtype=np.float64).ravel()
        array = array[np.isfinite(array)]
        if not len(array):
            return None
        low, high = bin_range(float(array.min()), float(array.max()))
        counts, _ = np.histogram(array, bins=num_bins, range=(low, high))
        return cls(low, high, tuple(counts.tolist()))

    @property
    def total(self) -> int:
        return sum(self.counts)

    def edges(self) -> list[float]:
        """The bounds of the bins, one more than there are bins."""
        bounds: list[float] = np.linspace(self.low, self.high, len(self.counts) + 1).tolist()
        return bounds


def bin_range(low: float, high: float) -> tuple[float, float]:
    """The range to divide into bins: from `low` to `high`, made wider where both are the same value."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = max(0.5, 1e-6 * abs(low))
    return low - margin, high + margin
