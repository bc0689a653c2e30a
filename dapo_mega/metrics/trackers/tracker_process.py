"""The process of one tracker: reads a run and its records from standard input, and gives them to the tracker.

It tells the trainer on standard output, once, if something fails, and where the run can be seen. Whatever the tracker's
package prints goes to the log, which is standard error.
"""

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from dapo_mega.metrics.run_text import without_credentials
from dapo_mega.metrics.trackers.records import Record, TrackedRun
from dapo_mega.metrics.trackers.run_identity import LastStep

_SECONDS_BETWEEN_ATTEMPTS = 60.0
_POLL_S = 1.0


class Tracker(Protocol):
    """An open run of a tracker. Any method may raise anything."""

    url: str | None
    """Where the run can be seen, if that is known."""

    def log(self, record: Record) -> None:
        """Send a record. Steps rise, those of late records for themselves."""

    def finish(self, *, is_finished: bool) -> None:
        """Send what is still to be sent, and mark the run as finished or as stopped."""


def main(backend: str) -> None:
    """Serve the trainer that started this process."""
    # The trainer says when to end; a signal for all of a job's processes reaches this one too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)  # Training goes first.
    events = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(**event: str) -> None:
        with contextlib.suppress(OSError):  # The trainer is gone.
            os.write(events, (json.dumps(event) + "\n").encode())

    lines = _lines(os.getppid())
    first = next(lines, None)
    if first is not None:
        run = TrackedRun.from_line(first)
        _end_after_the_trainer(run)
        with _alone(Path(run.folder) / f"{backend}.lock"):
            Service(run, backend, partial(open_run, backend), tell).serve(lines)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until the process of an earlier start of the run, which may still send its rest, has ended."""
    with path.open("w") as lock:
        with contextlib.suppress(OSError):  # The file system has no locks.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Service:
    """Where a tracker fails, it is tried again with the next record; opening it at most once a minute. Records that it
    does not take are lost, and the log says how many."""

    def __init__(
        self, run: TrackedRun, backend: str, open_run: Callable[[TrackedRun], Tracker], tell: Callable[..., None]
    ) -> None:
        self._run = run
        self._open_run = open_run
        self._tell = tell
        self._last = LastStep(Path(run.folder) / f"{backend}.json", run.id)
        self._tracker: Tracker | None = None
        self._next_attempt = 0.0
        self._num_lost = 0
        self._has_told = False

    def serve(self, lines: Iterable[bytes]) -> None:
        """Open the run, give all records to the tracker, and finish the run. Nothing that the tracker raises gets
        out."""
        self._open()
        is_finished = False
        for line in lines:
            message = json.loads(line)
            if "end" in message:
                is_finished = message["end"] == "finished"
                break
            self._take(Record.from_line(line))
        if self._num_lost:
            print(f"records that this tracker did not take: {self._num_lost}", file=sys.stderr)
        if self._tracker is not None:
            with self._failures_told():
                self._tracker.finish(is_finished=is_finished)

    def _open(self) -> None:
        """Open the run, unless that has failed less than a minute ago."""
        if time.monotonic() < self._next_attempt:
            return
        with self._failures_told():
            self._tracker = self._open_run(self._run)
            if self._tracker.url:
                self._tell(url=self._tracker.url)
        self._next_attempt = time.monotonic() + _SECONDS_BETWEEN_ATTEMPTS

    def _take(self, record: Record) -> None:
        """Give the tracker a record, unless it has one of this step or a later one: a resumed run computes again what
        it lost, and trackers cannot take a step back."""
        if self._last.has(record.step, is_late=record.is_late):
            return
        if self._tracker is None:
            self._open()
        self._num_lost += 1
        if self._tracker is not None:
            with self._failures_told():
                self._tracker.log(record)
                self._last.set(record.step, is_late=record.is_late)
                self._num_lost -= 1

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Of a foreign package: anything.
            traceback.print_exc()
            if not self._has_told:
                text = " ".join(str(without_credentials(str(error))).split())
                self._tell(failure=f"{type(error).__name__}: {text[:300]}")
            self._has_told = True


def _lines(trainer: int) -> Iterator[bytes]:
    """Lines of standard input until it ends, or until the trainer is gone: other processes may hold the pipe open."""
    rest = b""
    while True:
        if not select.select([0], [], [], _POLL_S)[0]:
            if os.getppid() != trainer:
                return
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _end_after_the_trainer(run: TrackedRun) -> None:
    """From now on this process ends some time after the trainer, whatever the tracker waits for."""

    def watch() -> None:
        while os.getppid() == run.trainer_pid:
            time.sleep(_POLL_S)
        time.sleep(run.close_limit_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def open_run(backend: str, run: TrackedRun) -> Tracker:
    """Open the run in its tracker, whose package no other process imports."""
    module = importlib.import_module(f"dapo_mega.metrics.trackers.{backend}_run")
    tracker: Tracker = getattr(module, f"{backend.capitalize()}Run")(run)
    return tracker
