"""Ends this process when its launcher or another rank ends, and stops the run at SIGTERM.

A thread watches for three events that a process inside a collective cannot see:

- torchrun is gone (`kill -9`): nobody else would end this process, and it would disturb the next run.
- Another rank has failed, or a machine has vanished (`peers.py`), so no rank waits for one that has ended.
- SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2: the run completes its step and a checkpoint within a grace period.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from typing import Self

import psutil

from dapo_mega.cli import (
    EXIT_CONTINUE,
    LAUNCHER,
    PEER_LOST,
    agree_before_leaving,
    is_started_by_torchrun,
    leave,
)
from dapo_mega.errors import StopRequested
from dapo_mega.training.peers import POLL_S, Peers

_READ_S = 3 * POLL_S
_LAUNCHER_LIMIT_S = 30.0
"""torchrun gets so long to report that a peer has failed, or `silence_limit_s` where that is longer."""
_NOTHING_SAVED = "the run was stopped by a signal before training began; start the same command again"


class ProcessWatch:
    """Watches from `__enter__` to `__exit__`, which the main thread must call, as they set signal handlers.

    `grace_s`: seconds after SIGTERM within which the run must end by itself. `silence_limit_s`: seconds without a sign
    of life after which another machine counts as gone.
    """

    def __init__(self, grace_s: float, silence_limit_s: float = 60.0) -> None:
        self._grace_s = grace_s
        self._silence_limit_s = silence_limit_s
        self._stop = threading.Event()
        self._closed = threading.Event()
        self._is_training = False
        self._deadline: float | None = None
        self._peers: Peers | None = None
        self._thread = threading.Thread(target=self._watch, name="process-watch", daemon=True)

    def __enter__(self) -> Self:
        # Python writes to this pipe when a signal arrives, also while the main thread is inside a collective.
        self._signals, self._signal_sink = os.pipe()
        os.set_blocking(self._signal_sink, False)
        # Schedulers send SIGUSR1 or SIGUSR2; a closed terminal sends SIGHUP, unless nohup has switched that off.
        asked = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        asked += [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        # The thread gets the signals through the pipe.
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in asked}
        self._old_sink = signal.set_wakeup_fd(self._signal_sink, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error a process with peers keeps watching until it exits: a peer's error may be the cause."""
        if kind is not None and self._peers is not None:
            return
        self.forget_peers()
        self._closed.set()
        with contextlib.suppress(BlockingIOError):  # Full of signals, it wakes the thread as well.
            os.write(self._signal_sink, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._old_sink)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        os.close(self._signals)
        os.close(self._signal_sink)

    def follow_peers(self, *, group_is_up: bool) -> None:
        """From now on tell the other ranks when this one fails, and exit when one of them fails.

        If torchrun hosts the store, this works before torch.distributed is initialised, else only afterwards. Does
        nothing in a run with one rank.
        """
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if address is None or port is None or int(os.environ.get("WORLD_SIZE", "1")) == 1 or self._peers is not None:
            return
        if not group_is_up and not _launcher_keeps_store():
            return
        self._peers = Peers(self._silence_limit_s, self._peer_failed, self._set_stop)
        keeps_store = os.environ.get("RANK") == "0" and not _launcher_keeps_store()
        agree_before_leaving(self._peers.agree, linger_s=_READ_S if keeps_store else 0.0)

    def forget_peers(self) -> None:
        """Stop following the peers: from now on they may end."""
        agree_before_leaving(None)
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def begin_training(self) -> None:
        """From now on SIGTERM leads to a checkpoint; before, it ends the process, as there is nothing to save."""
        self._is_training = True

    def stop_requested(self) -> bool:
        """Whether any process of the run has got SIGTERM."""
        return self._stop.is_set()

    def check_stop(self) -> None:
        """Raise StopRequested if so."""
        if self.stop_requested():
            raise StopRequested("the run was asked to stop")

    def _watch(self) -> None:
        while not self._closed.is_set():
            arrived = select.select([self._signals], [], [], POLL_S)[0]
            if self._closed.is_set():
                return
            if arrived and self._old_handlers.keys() & {*os.read(self._signals, 512)}:
                self._got_sigterm()
            _look_at_launcher()
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
        if self._peers is not None:
            self._peers.is_told_to_stop = True

    def _set_stop(self) -> None:
        if not self._stop.is_set():
            self._deadline = time.monotonic() + self._grace_s
            self._stop.set()

    def _peer_failed(self, message: str, status: int) -> None:
        _look_at_launcher()  # torchrun may have hosted the store.
        leave(message, status, launcher_limit_s=max(_LAUNCHER_LIMIT_S, self._silence_limit_s))


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
