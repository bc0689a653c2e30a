"""What the slow answers of one step may cost in all, so that hostile ones do not cost a limit of time each."""

import logging
import threading

logger = logging.getLogger(__name__)


class StepBudget:
    """Seconds that may go into answers without success: between two calls of `begin_step`, or within one call of the
    reward where nobody tells steps. The log says once `who` used them up, and what follows `then`."""

    def __init__(self, seconds: float, who: str, then: str) -> None:
        self._full_s = self._left_s = seconds
        self._message = f"{who} have used up the {seconds:g} s that they have in a step: until the next {then}"
        self._in_steps = self._warned = False
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """All of it is there again, for all calls up to the next `begin_step`."""
        with self._lock:
            self._in_steps, self._left_s = True, self._full_s

    def begin_call(self) -> None:
        """All of it is there again, unless steps are told."""
        with self._lock:
            if not self._in_steps:
                self._left_s = self._full_s

    def spend(self, seconds: float = 0.0) -> float:
        """Take off so many seconds; returns what is left, which may be less than 0."""
        with self._lock:
            self._left_s -= seconds
            return self._left_s

    def warn(self) -> None:
        """Log it, once, that an answer was cut short."""
        with self._lock:
            is_first, self._warned = not self._warned, True
        if is_first:
            logger.warning(self._message)


class Budgeted:
    """A reward with such a budget."""

    budget: StepBudget
