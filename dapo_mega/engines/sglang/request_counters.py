"""Counts requests: every submitted request is answered, failed, cancelled or still open, and counted once."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from dapo_mega.engines.sglang.api import Fault

End = Literal["answered", "failed", "cancelled"]
Cause = Literal[Fault, "unreachable", "disconnected", "timeout", "refused", "aborted"]
"""Why a call did not answer its request."""


class RequestCounters:
    """Counts since the start; `pop_metrics` gives the counts since its last call."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._ends: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._moves: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self.num_submitted = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def count(self, end: End) -> int:
        return self._ends[end]

    def submit(self, request_id: int) -> None:
        """Count a new request. Raises ValueError if it is open already."""
        if request_id in self._open:
            raise ValueError(f"request {request_id} is in flight already; give every request its own id")
        self._open.add(request_id)
        self.num_submitted += 1

    def close(self, request_id: int, end: End) -> None:
        """Count the end of an open request."""
        assert request_id in self._open, f"request {request_id} ended twice"
        self._open.remove(request_id)
        self._ends[end] += 1

    def call_failed(self, cause: Cause) -> None:
        """Count a call that did not answer its request."""
        self._causes[cause] += 1

    def moved(self) -> None:
        """Count a call that was given up because its engine left."""
        self._moves["moved"] += 1

    def taken_back(self) -> None:
        """Count a call that was aborted and continues with new weights."""
        self._moves["taken_back"] += 1

    def check(self) -> None:
        """Assert that the counts add up."""
        assert self.num_submitted == self._ends.total() + len(self._open)

    def pop_metrics(self) -> dict[str, float]:
        """Counts since the last call, and how many requests are open now."""
        totals = Counter({f"rollout/requests_{end}": self._ends[end] for end in get_args(End)})
        totals.update({f"rollout/requests_{move}": self._moves[move] for move in ("moved", "taken_back")})
        totals.update({f"rollout/failed_calls_{cause}": self._causes[cause] for cause in get_args(Cause)})
        totals["rollout/requests_submitted"] = self.num_submitted
        totals["rollout/failed_calls"] = self._causes.total()
        added = {name: float(total - self._reported[name]) for name, total in totals.items()}
        self._reported = totals
        return {**added, "rollout/requests_open": float(len(self._open))}
