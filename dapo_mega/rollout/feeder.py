"""Feeds the engines of an asynchronous run in a thread, while rank 0's main thread trains."""

from __future__ import annotations

import logging
import threading

from dapo_mega.errors import StopRequested
from dapo_mega.rollout.collector import Collector

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class Feeder:
    """Calls `Collector.feed` again and again between `start` and `stop`.

    The thread has the collector to itself meanwhile. What it raises ends the feeding and is raised by `check`, which
    the next step calls where all ranks hear of it.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, version: int) -> None:
        """Begin to feed the engines for the step that starts from weights of `version`."""
        self._is_over.clear()
        self._thread = threading.Thread(target=self._feed, args=(version,), name="feeding", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the scoring that is under way, and feed no more."""
        self._is_over.set()
        if self._thread:
            self._thread.join()

    def check(self) -> None:
        """Raise what ended the last feeding, if something did."""
        if self._failure:
            raise self._failure

    def _feed(self, version: int) -> None:
        try:
            while not self._is_over.wait(_POLL_S):
                self._collector.feed(version)
        except StopRequested:
            pass  # The main thread is asked to stop too, and ends the run after the step.
        except BaseException as error:
            logger.error("the run ends after this step: %s", error)
            self._failure = error
