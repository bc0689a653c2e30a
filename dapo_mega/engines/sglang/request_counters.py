"""Counts requests: every submitted request is answered, failed, cancelled or still open, and counted once."""

from __future__ import annotations

from collections import Counter
from typing import Generic, Literal, TypeVar, get_args

from dapo_mega.engines.protocol import Generation
from dapo_mega.engines.sglang.api import Fault
from dapo_mega.engines.sglang.engine_client import CallFault

G = TypeVar("G", bound=Generation)
End = Literal["answered", "failed", "cancelled"]
Move = Literal["moved", "taken_back"]
"""Why a call was given up: its engine left, or it was aborted and continues with new weights."""
Cause = Literal[Fault, CallFault, "aborted"]
"""Why a call did not answer its request."""

_COUNTED = (
    *(f"requests_{kind}" for kind in (*get_args(End), *get_args(Move))),
    *(f"failed_calls_{cause}" for cause in get_args(Cause)),
    *("requests_submitted", "failed_calls"),
)


class RequestCounters(Generic[G]):
    """Counts since the start; `pop_metrics` gives the counts since its last call. `open`: the open requests by id."""

    def __init__(self) -> None:
        self.open: dict[int, G] = {}
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()

    def count(self, end: End) -> int:
        return self._counts[f"requests_{end}"]

    def submit(self, generation: G) -> None:
        """Count a new request. Raises ValueError if its id is open already."""
        if (request_id := generation.request.request_id) in self.open:
            raise ValueError(f"request {request_id} is in flight already; give every request its own id")
        self.open[request_id] = generation
        self._counts["requests_submitted"] += 1

    def close(self, generation: G, end: End) -> None:
        """Count the end of an open request."""
        ended = self.open.pop(generation.request.request_id, None)
        assert ended is generation, f"request {generation.request.request_id} ended twice"
        self._counts[f"requests_{end}"] += 1

    def call_failed(self, cause: Cause) -> None:
        """Count a call that did not answer its request."""
        self._counts["failed_calls"] += 1
        self._counts[f"failed_calls_{cause}"] += 1

    def given_up(self, move: Move) -> None:
        """Count a call that goes on elsewhere or later."""
        self._counts[f"requests_{move}"] += 1

    def check(self) -> None:
        """Assert that the counts add up."""
        assert self._counts["requests_submitted"] == sum(map(self.count, get_args(End))) + len(self.open)

    def pop_metrics(self) -> dict[str, float]:
        """Counts since the last call, and how many requests are open now."""
        added = {f"rollout/{name}": float(self._counts[name] - self._reported[name]) for name in _COUNTED}
        self._reported = self._counts.copy()
        return {**added, "rollout/requests_open": float(len(self.open))}
