"""Ends this process when its launcher or another rank ends, and stops the run at SIGTERM.

A thread watches for three events that a process inside a collective cannot see:

- torchrun is gone (`kill -9`): nobody else would end this process, and it would disturb the next run.
- Another rank has failed: before it exits it writes its error into torch.distributed's store, so no rank waits for one
  that has ended.
- SIGTERM: the run completes its step and a checkpoint within a grace period.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Self

import psutil
import torch
import torch.distributed as dist

from dapo_mega.cli import (
    EXIT_CONTINUE,
    EXIT_FAULT,
    LAUNCHER,
    PEER_LOST,
    Reason,
    agree_before_leaving,
    is_started_by_torchrun,
    leave,
)
from dapo_mega.errors import StopRequested

_POLL_S = 0.5
_READ_S = 3 * _POLL_S
_STORE_TIMEOUT = timedelta(seconds=10)
_FAILURE = "failure"
_STOP = "stop"
_NOTHING_SAVED = "the run was stopped by SIGTERM before training began; start the same command again"


class ProcessWatch:
    """Watches from `__enter__` to `__exit__`, which the main thread must call, as they set signal handlers.

    `grace_s`: seconds after SIGTERM within which the run must end by itself.
    """

    def __init__(
        self,
        grace_s: float,
    ) -> None:
        self._grace_s = grace_s
        self._stop = threading.Event()
        self._closed = threading.Event()
        self._is_training = False
        self._deadline: float | None = None
        self._store: dist.Store | None = None
        self._thread = threading.Thread(target=self._watch, name="process-watch", daemon=True)

    def __enter__(self) -> Self:
        # Python writes to this pipe when a signal arrives, also while the main thread is inside a collective.
        self._signals, self._signal_sink = os.pipe()
        os.set_blocking(self._signal_sink, False)
        self._old_handler = signal.signal(signal.SIGTERM, _ignore)
        self._old_sink = signal.set_wakeup_fd(self._signal_sink, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback_: TracebackType | None,
    ) -> None:
        """After an error a process with peers keeps watching until it exits: a peer's error may be the cause."""
        if exc is not None and self._store is not None:
            return
        agree_before_leaving(None)
        self._closed.set()
        self._thread.join()
        signal.set_wakeup_fd(self._old_sink)
        signal.signal(signal.SIGTERM, self._old_handler)
        os.close(self._signals)
        os.close(self._signal_sink)

    def follow_peers(self, *, group_is_up: bool) -> None:
        """From now on tell the other ranks when this one fails, and exit when one of them fails.

        If torchrun hosts the store, this works before torch.distributed is initialised, else only afterwards. Does
        nothing in a run with one rank.
        """
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if address is None or port is None or int(os.environ.get("WORLD_SIZE", "1")) == 1 or self._store is not None:
            return
        if not group_is_up and not _launcher_keeps_store():
            return
        store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        # torchrun keeps the same store when it restarts its processes.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"dapo_mega/attempt_{attempt}", store)
        keeps_store = os.environ.get("RANK") == "0" and not _launcher_keeps_store()
        agree_before_leaving(self._agree, linger_s=_READ_S if keeps_store else 0.0)

    def forget_peers(self) -> None:
        """Stop following the peers: from now on they may end."""
        agree_before_leaving(None)
        self._store = None

    def begin_training(self) -> None:
        """From now on SIGTERM leads to a checkpoint; before, it ends the process, as there is nothing to save."""
        self._is_training = True

    def stop_requested(self) -> bool:
        """Whether any process of the run has got SIGTERM."""
        return self._stop.is_set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            arrived = select.select([self._signals], [], [], _POLL_S)[0]
            if self._closed.is_set():
                return
            if arrived and signal.SIGTERM in os.read(self._signals, 512):
                self._got_sigterm()
            _look_at_launcher()
            self._look_at_peers()
            if self._deadline is not None and time.monotonic() > self._deadline:
                leave(
                    f"the step did not end within {self._grace_s:g} s after SIGTERM (checkpoint.grace_s); start the "
                    f"same command again to continue from the last checkpoint, and raise checkpoint.grace_s, torchrun "
                    f"--shutdown-timeout and the scheduler's own limit",
                    EXIT_CONTINUE,
                )

    def _got_sigterm(self) -> None:
        if not _siblings_live():
            # One process has failed, and torchrun ends the others, which would wait for it for ever.
            leave(PEER_LOST, EXIT_CONTINUE)
        if not self._is_training:
            leave(_NOTHING_SAVED, EXIT_CONTINUE)
        self._set_stop()
        with contextlib.suppress(dist.DistError, OSError):  # The store is gone, and so are the peers.
            if self._store is not None:
                self._store.set(_STOP, "")

    def _set_stop(self) -> None:
        if not self._stop.is_set():
            self._deadline = time.monotonic() + self._grace_s
            self._stop.set()

    def _look_at_peers(self) -> None:
        store = self._store
        if store is None:
            return
        try:
            failure = store.get(_FAILURE) if store.check([_FAILURE]) else None
            if store.check([_STOP]):
                self._set_stop()
        except (dist.DistError, OSError) as error:
            if self._closed.is_set():
                return
            self._store = None
            _look_at_launcher()  # torchrun may have hosted the store.
            first_line = str(error).splitlines()[0]
            leave(
                f"the store of torch.distributed at {os.environ.get('MASTER_ADDR')} is gone ({first_line}): the first "
                f"machine's processes have ended; see their output, and start the same command again",
                EXIT_FAULT,
            )
        if failure is not None:
            leave(*json.loads(failure))

    def _agree(self, reason: Reason) -> Reason:
        """Tell the peers why this process exits, unless one was earlier; returns the reason of the first one."""
        try:
            if self._store is not None:
                message, status = json.loads(self._store.compare_set(_FAILURE, "", json.dumps(reason)))
                return message, status
        except (dist.DistError, OSError):
            pass  # The store ended together with its readers.
        return reason


def stop_together(requested: bool, control: dist.ProcessGroup | None) -> None:
    """Raise StopRequested on all ranks when one of them was asked to stop. Collective over `control` (gloo)."""
    box = torch.tensor([float(requested)])
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=control)
    if box.item():
        raise StopRequested("the run was asked to stop")


def _launcher_keeps_store() -> bool:
    """Whether torchrun hosts torch.distributed's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _look_at_launcher() -> None:
    """Exit if torchrun is gone."""
    if is_started_by_torchrun() and os.getppid() != LAUNCHER:
        leave(
            f"torchrun (process {LAUNCHER}) is gone, so its processes end; start the same command again to continue "
            f"from the last checkpoint",
            EXIT_CONTINUE,
        )


def _ignore(signal_number: int, frame: FrameType | None) -> None:
    """The thread gets the signal through the pipe."""


def _siblings_live() -> bool:
    """Whether all processes that torchrun started on this machine are alive."""
    if not is_started_by_torchrun():
        return True
    try:
        children = psutil.Process(LAUNCHER).children()
        living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return False
    return len(living) >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
