"""The trainer's side of a tracker: a queue, and a thread that feeds the tracker's process from it.

Nothing here raises into training or waits for the tracker before the run's end. Whatever goes wrong is said in one
warning for each tracker.
"""

import contextlib
import importlib.util
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import dapo_mega
from dapo_mega.metrics.trackers.records import Record, TrackedRun, end_line

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
"""Records that wait for a slow tracker; when they are more, further ones are left out."""
STOP_LIMIT_S = 3.0
_MAX_EVENT_CHARACTERS = 2**16
_PACKAGE_FOLDER = str(Path(dapo_mega.__file__).resolve().parents[1])


class BackgroundTracker:
    """Sends records to a tracker in a process of its own. `hidden` are environment variables that it does not get."""

    def __init__(
        self, backend: str, run: TrackedRun, *, hidden: Sequence[str] = (), command: Sequence[str] | None = None
    ) -> None:
        self.backend = backend
        self.limit_s = run.close_limit_s
        self._log_path = Path(run.folder) / f"{backend}.log"
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUE_LENGTH)
        self._num_lost = 0
        self._has_warned = False
        self._is_closing = False
        self._warning = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        try:
            with self._log_path.open("a") as log:
                self._process = subprocess.Popen(
                    command or _command(backend),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for the trainer, which then tells the tracker.
                )
        except OSError as error:
            self._warn(f"its process cannot be started ({error})")
            return
        self._queue.put_nowait(run.to_line())
        self._feeder = threading.Thread(target=self._feed, name=f"{backend}-feeder", daemon=True)
        self._listener = threading.Thread(target=self._listen, name=f"{backend}-listener", daemon=True)
        self._feeder.start()
        self._listener.start()

    def log(self, record: Record) -> None:
        """Queue a record. Returns at once; does nothing when the tracker's process is gone."""
        if self._process is None or self._process.poll() is not None:
            return
        try:
            self._queue.put_nowait(record.to_line())
        except queue.Full:
            self._num_lost += 1
            self._warn(f"it is slower than the run: {QUEUE_LENGTH} steps wait for it, and further ones are left out")

    def begin_close(self, deadline: float, *, is_finished: bool) -> None:
        """Say that no more records come; until `deadline` there may be no room in the queue for that."""
        if self._process is None or self._is_closing:
            return
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            for line in (end_line(is_finished=is_finished), None):
                self._queue.put(line, timeout=max(deadline - time.monotonic(), 0.1))

    def end(self, deadline: float, *, kill: bool) -> None:
        """Wait until the tracker has sent everything, at most until the `time.monotonic()` of `deadline`.

        Afterwards its process is killed; without `kill` it goes on by itself, for at most its own limit.
        """
        if self._process is None:
            return
        self._feeder.join(max(deadline - time.monotonic(), 0))
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            if not kill:
                return
            self._warn(f"it did not send all steps within {self.limit_s:g} s of the end (tracking.close_limit_s)")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._listener.join(1.0)
        self._process = None

    def _feed(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:  # The listener says why it ended.
            while (line := self._queue.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _listen(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with process.stdout as events:
            while line := events.readline(_MAX_EVENT_CHARACTERS):  # Packages of trackers may write there, too.
                with contextlib.suppress(ValueError, RecursionError):
                    match json.loads(line):
                        case {"url": str(url)}:
                            logger.info("%s shows this run at %s", self.backend, url)
                        case {"failure": str(failure)}:
                            self._warn(failure)
        if process.wait() and not self._is_closing:
            self._warn(f"its process ended with status {process.returncode}")

    def _warn(self, what: str) -> None:
        """Say it if nothing was said of this tracker before."""
        with self._warning:
            if self._has_warned:
                return
            self._has_warned = True
        logger.warning(
            "%s does not get all of this run: %s. Training goes on, and metrics.jsonl has every step; see %s",
            self.backend,
            what,
            self._log_path,
        )


def close_all(trackers: Sequence[BackgroundTracker], *, is_finished: bool) -> None:
    """End all trackers together. A finished run waits for them until their limit, and then kills them; a stopped one
    leaves them after some seconds, and they end by themselves."""
    limit_s = max((tracker.limit_s for tracker in trackers), default=0.0)
    deadline = time.monotonic() + (limit_s if is_finished else min(limit_s, STOP_LIMIT_S))
    for tracker in trackers:
        tracker.begin_close(deadline, is_finished=is_finished)
    for tracker in trackers:
        tracker.end(deadline, kill=is_finished)


def _command(backend: str) -> list[str]:
    program = (
        f"import sys; sys.path.append({_PACKAGE_FOLDER!r})\n"
        f"from dapo_mega.metrics.trackers.tracker_process import main; main({backend!r})"
    )
    # -P: no module is imported from the working folder, where trackers make folders of their own name.
    return [sys.executable, "-P", "-c", program]


def missing_packages(backends: Sequence[str]) -> str | None:
    """One sentence that names the missing packages of these backends and the command that installs them; None if all
    are there."""
    # A folder of that name, which trackers themselves make in the working folder, is found too, but has no origin.
    specs = {name: importlib.util.find_spec(name) for name in backends}
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if not missing:
        return None
    packages = "package is" if len(missing) == 1 else "packages are"
    return (
        f"tracking.backends names {', '.join(missing)}, whose {packages} not installed; run: "
        f"pip install 'dapo_mega[{','.join(missing)}]' (in the project folder: pip install -e '.[{','.join(missing)}]')"
    )
