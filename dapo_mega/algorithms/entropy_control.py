"""An entropy bonus whose coefficient follows a target (Skywork-OR1, arXiv 2505.22312, section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class EntropyControl:
    """The coefficient of the entropy bonus, step by step.

    Without a `target` it is constant. With one it rises by `increment` after every step whose entropy (mean per token,
    in nats) was below the target, but not above `maximum`, falls by as much otherwise, but not below 0, and applies
    only while the last measured entropy was at most the target.
    """

    coefficient: float
    target: float | None
    increment: float
    last_entropy: float | None = None
    maximum: float = math.inf

    def __post_init__(self) -> None:
        self._start = self.coefficient

    def current(self) -> float:
        """The coefficient for the next step."""
        if self.target is None:
            return self.coefficient
        is_low = self.last_entropy is not None and self.last_entropy <= self.target
        return self.coefficient if is_low else 0.0

    def observe(self, entropy: float) -> None:
        """Take note of the entropy of the step that has just been made."""
        if self.target is None:
            return
        change = self.increment if entropy < self.target else -self.increment
        self.coefficient = min(max(0.0, self.coefficient + change), self.maximum)
        self.last_entropy = entropy

    def state(self) -> tuple[float | None, ...]:
        """For a checkpoint; `load_state` takes it."""
        return self.coefficient, self.last_entropy, self._start

    def load_state(self, state: Sequence[float | None]) -> None:
        """Continue from `state`. A constant coefficient, and one that began with another, stay the configuration's."""
        if self.target is None:
            return
        coefficient, self.last_entropy, start = (*state, self._start)[:3]  # Earlier versions saved no start.
        if start == self._start and coefficient is not None:
            self.coefficient = min(coefficient, self.maximum)
