"""Commands of a process that is not among a trainer's: over a connection to rank 0 of one, and of the next one where
that dies. Both ends know a key; what goes over the connection is pickled, and not encrypted."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from dapo_mega.distributed.commands import EXPECTED, Commanded, End
from dapo_mega.errors import FleetError, StopRequested, TrainerLost

_STOP = "stop"
_POLL_S = 0.2


class Links:
    """The end that commands. Trainers come and go; one is commanded at a time. One whose machine gives no sign of life
    for `silence_limit_s` has died."""

    def __init__(self, host: str, silence_limit_s: float) -> None:
        """Listens at this address of the machine, at `address`. Raises OSError if it cannot."""
        self._silence_limit_s = silence_limit_s
        self.key = secrets.token_hex(32)
        family = "AF_INET6" if ":" in host else "AF_INET"
        self._listener = Listener((host, 0), family, backlog=4, authkey=self.key.encode())
        self.address: tuple[str, int] = (host, self._listener.address[1])  # type: ignore[index]
        self._arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._link: Connection | None = None
        self._is_told_to_stop = False
        threading.Thread(target=self._accept, name="trainers", daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):
                try:
                    self._arrived.put(self._listener.accept())
                except OSError:
                    return  # It is closed.

    def meet(self, limit_s: float, check: Callable[[], None]) -> None:
        """Wait for the next trainer; `check` is called meanwhile, and may raise. Raises FleetError after the limit."""
        self._link = None
        waited_s = 0.0
        while self._link is None:
            check()
            with contextlib.suppress(queue.Empty):
                self._link = _broken_by_silence(self._arrived.get(timeout=_POLL_S), self._silence_limit_s)
            waited_s += _POLL_S
            if waited_s > limit_s and self._link is None:
                raise FleetError(
                    f"no trainer has come for {limit_s:g} s (controller.wait_limit_s); start the same command again"
                )

    def command(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """See `Commanded.command`. Raises TrainerLost where the trainer dies."""
        assert self._link
        try:
            _send(self._link, (name, arguments, named))
            while (message := _receive(self._link)) == _STOP:
                self._is_told_to_stop = True
        except (EOFError, OSError) as error:
            raise TrainerLost(f"the trainer has ended while it was told to {name}") from error
        answers: list[Any]
        answers, failure = message
        if failure:
            raise failure
        return answers

    def check_stop(self) -> None:
        """Raise StopRequested if the trainer was told to stop."""
        with contextlib.suppress(EOFError, OSError):  # It is gone; the next command says so.
            while self._link and self._link.poll():
                self._is_told_to_stop |= _receive(self._link) == _STOP
        if self._is_told_to_stop:
            raise StopRequested("the run was asked to stop")

    def dismiss(self, error: Exception | None) -> None:
        with contextlib.suppress(OSError):
            if self._link:
                _send(self._link, End(error))

    def close(self) -> None:
        """Let no other trainer come."""
        # A listening socket that is closed still wakes nobody.
        with contextlib.suppress(OSError), socket.create_connection(self.address, 1):
            self._listener.close()


def connect(address: tuple[str, int], key: str, silence_limit_s: float) -> Connection:
    """The connection of rank 0 to what commands it. Raises OSError or AuthenticationError where there is nobody."""
    return _broken_by_silence(Client(address, authkey=key.encode()), silence_limit_s)


def _broken_by_silence(link: Connection, limit_s: float) -> Connection:
    """The link, which breaks where the other machine answers nothing for so long: one that vanishes closes nothing."""
    every_s = int(limit_s / 4)
    with socket.socket(fileno=os.dup(link.fileno())) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit_s))
    return link


def follow(trainer: Commanded, link: Connection, is_to_stop: Callable[[], bool]) -> None:
    """On rank 0: do, together with the other ranks, what comes over the link, until that ends. `is_to_stop` tells
    whether one of the trainer's processes was told to stop, which is passed on. Raises the error that the other end
    ends with, and FleetError where it dies."""
    is_told = False
    while True:
        try:
            while not link.poll(_POLL_S):
                if is_to_stop() and not is_told:
                    is_told = True
                    _send(link, _STOP)
            order = _receive(link)
        except (EOFError, OSError) as error:
            raise FleetError(
                "the process that commands the run has ended without saying why: it was killed, for memory perhaps, or "
                "its machine is gone; start the same command again to continue from the last checkpoint"
            ) from error
        if isinstance(order, End):
            if order.error:
                raise order.error
            return
        name, arguments, named = order
        reply: tuple[list[Any], Exception | None]
        try:
            reply = trainer.command(getattr(type(trainer), name).alone, arguments, named), None
        except EXPECTED as error:
            reply = [], error
        _send(link, reply)


def _send(link: Connection, message: Any) -> None:
    # The connection's own way shares the memory of tensors with a child process.
    link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _receive(link: Connection) -> Any:
    return pickle.loads(link.recv_bytes())
