"""What the processes of a run tell each other over torch.distributed's store: failures, stops, and that they live.

The store is on the first machine. When a machine vanishes, no connection to it breaks, so calls to the store are made
by a thread of their own, and whoever waits for it does so for a limited time.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from dapo_mega.cli import EXIT_CONTINUE, EXIT_FAULT, Reason
from dapo_mega.distributed.event_loops import DAEMON_THREADS
from dapo_mega.distributed.stores import attempt_prefix, connect_store

POLL_S = 0.5
_ANSWER_S = 10.0
_SIGN_S = 2.0
_FAILURE = "failure"
_STOP = "stop"


class Peers:
    """The other processes of a run. `failed(message, status)` is called, once and in a thread of its own, when one of
    them has failed, or when a machine has given no sign of life for `silence_limit_s`; `stop` when one was told to.
    `is_told_to_stop` is to be set where this one was: the others are told as soon as the store answers."""

    def __init__(self, silence_limit_s: float, failed: Callable[[str, int], None], stop: Callable[[], None]) -> None:
        """Raises `torch.distributed.DistError` if the store of MASTER_ADDR and MASTER_PORT does not answer."""
        self._limit_s = silence_limit_s
        self._failed = failed
        self._stop = stop
        self._address = os.environ["MASTER_ADDR"]
        store = connect_store(self._address, int(os.environ["MASTER_PORT"]), _ANSWER_S)
        self._store: dist.Store = dist.PrefixStore(attempt_prefix(), store)
        self._machine = int(os.environ.get("GROUP_RANK", "0"))
        self._num_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self._signs: dict[int, tuple[int, float]] = {}
        self._has_told_stop = self.is_told_to_stop = False
        self._is_silent = False
        self._closed = threading.Event()
        self._answered = time.monotonic()
        for name, loop in (("peers", self._talk), ("silence", self._listen)):
            threading.Thread(target=loop, name=name, daemon=True).start()

    def close(self) -> None:
        """From now on the peers may end."""
        self._closed.set()

    def agree(self, reason: Reason) -> Reason:
        """Tell the others why this process exits, unless one was earlier; returns the reason of the first one, or
        this one's where the store does not answer in time."""
        if self._is_silent:
            return reason
        answer = DAEMON_THREADS.submit(partial(self._store.compare_set, _FAILURE, "", json.dumps(reason)))
        try:
            message, status = json.loads(answer.result(_ANSWER_S))
        except (RuntimeError, OSError, ValueError):
            return reason  # The store does not answer in time, or has ended together with its readers.
        return message, status

    def _talk(self) -> None:
        signed = 0.0
        while not self._closed.wait(POLL_S):
            try:
                self._exchange()
                if time.monotonic() - signed > _SIGN_S:
                    signed = time.monotonic()
                    self._sign()
            except (dist.DistError, OSError) as error:
                if not self._closed.is_set():
                    self._failed(
                        f"the store of torch.distributed at {self._address} is gone ({str(error).splitlines()[0]}): "
                        f"the first machine's processes have ended; see their output, and start the same command again",
                        EXIT_FAULT,
                    )
                return
            self._answered = time.monotonic()

    def _exchange(self) -> None:
        failure = self._store.get(_FAILURE) if self._store.check([_FAILURE]) else None
        if self.is_told_to_stop and not self._has_told_stop:
            self._store.set(_STOP, "")
            self._has_told_stop = True
        if self._store.check([_STOP]):
            self._stop()
        if failure is not None and not self._closed.is_set():
            self._failed(*json.loads(failure))

    def _sign(self) -> None:
        """One process of each machine counts up; the first one of all looks whether the others do."""
        if self._num_machines == 1 or os.environ.get("LOCAL_RANK") != "0":
            return
        if self._machine:
            self._store.set(f"name_{self._machine}", socket.gethostname())
            self._store.add(f"signs_{self._machine}", 1)
            return
        for machine in range(1, self._num_machines):
            count = self._store.add(f"signs_{machine}", 0)
            seen, since = self._signs.get(machine, (0, 0.0))
            if count != seen:
                self._signs[machine] = count, time.monotonic()
            elif count and time.monotonic() - since > self._limit_s and not self._closed.is_set():
                name = self._store.get(f"name_{machine}").decode()
                self._failed(self._silence(f"machine {machine} ({name})"), EXIT_CONTINUE)

    def _listen(self) -> None:
        """The store itself may be on the machine that has vanished."""
        while not self._closed.wait(POLL_S):
            if time.monotonic() - self._answered > self._limit_s:
                self._is_silent = True
                self._failed(self._silence(f"the first machine ({self._address})"), EXIT_CONTINUE)
                return

    def _silence(self, machine: str) -> str:
        return (
            f"{machine} has given no sign of life for {self._limit_s:g} s (silence_limit_s): it is gone, or the "
            f"network to it; start the same command again to continue from the last checkpoint"
        )
