"""Feeds the engines of an asynchronous run in a thread, while rank 0's main thread trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dapo_mega.errors import StopRequested
from dapo_mega.rollout.collector import Collector

_POLL_S = 0.02


class Feeder:
    """Calls `Collector.feed` again and again while `beside` is entered.

    The thread has the collector to itself meanwhile. What it raises ends the feeding and is raised by `check`, which
    the next step calls where all ranks hear of it.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._failure: Exception | None = None

    @contextmanager
    def beside(self, version: int) -> Iterator[None]:
        """Feed the engines for the step that starts from weights of `version`. Waits at its end for the scoring that
        is under way."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._feed, args=(version, is_over), name="feeding", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def check(self) -> None:
        """Raise what ended the last feeding, if something did."""
        if self._failure:
            raise self._failure

    def _feed(self, version: int, is_over: threading.Event) -> None:
        try:
            while not is_over.wait(_POLL_S):
                self._collector.feed(version)
        except StopRequested:
            pass  # The main thread is asked to stop too, and ends the run after the step.
        except Exception as error:
            self._failure = error
