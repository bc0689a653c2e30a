"""Feeds the engines of an asynchronous run in a thread, while rank 0's main thread does anything but collect groups."""

from __future__ import annotations

import logging
import threading
import time

from dapo_mega.errors import StopRequested
from dapo_mega.rollout.collector import Collector

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class Feeder:
    """Calls `Collector.feed` again and again between `start` and `stop`.

    What it raises ends the feeding for good and is raised by `check`, which the next step calls where all ranks hear of
    it.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        # What the next step starts from, and whether the engines have it; None: feed nothing.
        self._wanted: tuple[int, bool] | None = None
        self._thread: threading.Thread | None = None

    def start(self, version: int) -> None:
        """Begin to feed the engines for the step that starts from weights of `version`."""
        with self._lock:
            self._wanted = version, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._feed, name="feeding", daemon=True)
                self._thread.start()

    def engines_have_weights(self) -> None:
        """The engines have the weights that the next step starts from."""
        with self._lock:
            if self._wanted:
                self._wanted = self._wanted[0], True

    def stop(self) -> None:
        """Feed no more. Does not wait for the scoring that is under way: `Collector.collect` does if it must."""
        self._wanted = None

    def check(self) -> None:
        """Raise what ended the feeding, if something did."""
        if self._failure:
            raise self._failure

    def _next(self) -> tuple[int, bool] | None:
        """What is wanted; if nothing is, the thread is to end."""
        with self._lock:
            if self._wanted is None:
                self._thread = None
            return self._wanted

    def _feed(self) -> None:
        try:
            while wanted := self._next():
                self._feed_once(*wanted)
                time.sleep(_POLL_S)
        except StopRequested:
            pass  # The main thread is asked to stop too, and ends the run after the step.
        except BaseException as error:
            logger.error("the run ends after this step: %s", error)
            self._failure = error

    def _feed_once(self, version: int, engines_have_it: bool) -> None:
        def goes_on() -> bool:
            wanted = self._wanted
            return wanted is not None and wanted[0] == version

        self._collector.feed(version, engines_have_it=engines_have_it, goes_on=goes_on)
