"""Collects what the trainer does while it works."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dapo_mega.metrics.timeline.load import LoadHistory
from dapo_mega.metrics.timeline.records import Load, Span, StepTimeline

_MAX_SPANS = 512


class Activity:
    """What one process does, between two calls of `pop`. Spans may come from several threads; of very many the last
    512 are kept. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._since = clock()
        self._spans: deque[tuple[str, Span]] = deque(maxlen=_MAX_SPANS)
        self._lock = threading.Lock()
        self._scoring = LoadHistory(self._since)

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """The block is work of this lane, also when it ends in an exception."""
        start = self.clock()
        try:
            yield
        finally:
            self.add(lane, Span(name, start, self.clock()))

    def add(self, lane: str, span: Span) -> None:
        """Work of this lane that has ended."""
        self._spans.append((lane, span))

    @contextmanager
    def scoring(self, num_responses: int) -> Iterator[None]:
        """In the block so many responses are scored."""

        def count(by: int) -> None:
            with self._lock:  # Times must not fall.
                self._scoring.change(self.clock(), by)

        count(num_responses)
        try:
            yield
        finally:
            count(-num_responses)

    def pop(self, step: int, engines: Mapping[str, Sequence[Load]]) -> StepTimeline:
        """What was done since the last call, as belonging to `step`; `engines` as `RolloutFleet.pop_loads` gives
        them."""
        with self._lock:
            now = self.clock()
            scored = self._scoring.pop(now)
        spans: dict[str, list[Span]] = {}
        while self._spans:
            lane, span = self._spans.popleft()
            spans.setdefault(lane, []).append(span)
        started, self._since = self._since, now
        return StepTimeline(step, started, now, spans, scored, engines)
