"""Accumulates the metrics of one training step over its micro-batches and rollouts."""

import math
from dataclasses import dataclass
from typing import Literal, SupportsFloat

from dapo_mega.metrics.names import validate_metric_name

Reduction = Literal["mean", "max", "sum"]


@dataclass
class _Entry:
    reduction: Reduction
    total: float
    weight: float = 0.0

    def result(self) -> float:
        if self.reduction != "mean":
            return self.total
        # A mean over nothing has no value; NaN shows that in the curves, where 0 would look measured.
        return self.total / self.weight if self.weight > 0 else math.nan


class MetricAccumulator:
    """Weighted means, maxima and sums by metric name, until `reset`.

    A NaN or an infinity that goes in shows in the result: it is never dropped. A name keeps one
    reduction until `reset`. Values are read with `float()`, so a tensor on a GPU synchronises.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(self, name: str, value: SupportsFloat, weight: float = 1.0) -> None:
        """Add one observation to the weighted mean of `name`.

        `weight` is what the value is a mean over, such as its number of tokens. Raises ValueError for
        a malformed name, a negative or non-finite weight, or a name that has another reduction.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight of metric {name!r} is {weight}; expected a finite number >= 0")
        entry = self._entry(name, "mean", initial=0.0)
        entry.total += float(value) * weight
        entry.weight += weight

    def add_max(self, name: str, value: SupportsFloat) -> None:
        """Keep the largest value of `name`; one NaN makes the result NaN. Raises as `add`."""
        entry = self._entry(name, "max", initial=-math.inf)
        number = float(value)
        # max() with NaN depends on the order of its arguments; here a NaN wins and then stays.
        if math.isnan(number) or number > entry.total:
            entry.total = number

    def add_sum(self, name: str, value: SupportsFloat) -> None:
        """Add `value` to the sum of `name`. Raises as `add`."""
        self._entry(name, "sum", initial=0.0).total += float(value)

    def summary(self) -> dict[str, float]:
        """The reduced value of every name, in order of first use; a mean of total weight 0 is NaN."""
        return {name: entry.result() for name, entry in self._entries.items()}

    def reset(self) -> None:
        """Forget all names and values."""
        self._entries.clear()

    def _entry(self, name: str, reduction: Reduction, initial: float) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            validate_metric_name(name)
            entry = self._entries[name] = _Entry(reduction, initial)
        if entry.reduction != reduction:
            raise ValueError(
                f"metric {name!r} is accumulated as a {entry.reduction} and was now given as a {reduction}; "
                "use two names"
            )
        return entry
