"""Where engines of other machines become known: they announce themselves at the trainer's rendezvous address.

The address is a TCPStore of the trainer's rank 0. Announcements are signed with the API key and repeated, so that a
trainer that starts again finds its engines. The store itself is open to everyone who can reach it: strangers can delay
announcements, not make one.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistError, QueueEmptyError, TCPStore

from dapo_mega.errors import InputError

logger = logging.getLogger(__name__)

_MIN_KEY_LENGTH = 16
_QUEUE = "dapo_mega/announcements"
_MAX_AGE_S = 300.0
_MAX_PER_POLL = 1000
_CONNECT_TIMEOUT_S = 2.0
_LISTEN_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Registration:
    """An engine. `instance` differs between two starts of the engine at the same `url`."""

    url: str
    instance: str


def require_api_key(env_name: str) -> str:
    """The API key that the environment variable holds. Raises InputError where there is none."""
    key = os.environ.get(env_name, "")
    if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        given = "is not set" if not key else f"is no word of at least {_MIN_KEY_LENGTH} ASCII characters"
        raise InputError(
            f"{env_name} {given}, and engines take weights from everyone who has their key; give the trainer and all "
            f'engines the same secret: export {env_name}=$(python3 -c "import secrets; print(secrets.token_hex(32))")'
        )
    return key


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`. Raises InputError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{address!r} is not an address; give host:port, such as 10.0.0.1:21600")
    return host, int(port)


class EngineRegistry:
    """The trainer's side: listens at `address` (this interface only) for engines that hold the API key.

    An address in use is waited for for a while: what the trainer before left may still hold it. Raises InputError where
    the address cannot be listened at.
    """

    def __init__(self, address: str, api_key: str) -> None:
        self._api_key = api_key
        self._registered: dict[str, Registration] = {}
        self._newest: dict[str, float] = {}
        self._refusals: set[str] = set()
        host, port = parse_address(address)
        try:
            listener = _listen(host, port)
        except OSError as error:
            raise InputError(
                f"rollout.fleet.rendezvous={address} cannot be listened at ({error.strerror}); give an address of "
                "this machine and a free port, none that engines (22000 to 29999) or the system (on Linux from 32768) "
                "take for themselves"
            ) from error
        self._store: TCPStore | None = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )

    def poll(self) -> list[Registration]:
        """The engines that are registered now. Does not wait."""
        assert self._store is not None, "the registry is closed"
        for _ in range(_MAX_PER_POLL):
            try:
                self._take(self._store.queue_pop(_QUEUE, False))
            except QueueEmptyError:
                break
        return list(self._registered.values())

    def close(self) -> None:
        """Stop listening."""
        self._store = None

    def _take(self, message: bytes) -> None:
        try:
            registration, sent_at, leaving = _verified(message, self._api_key)
        except _RefusedError as error:
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                logger.warning("an engine's announcement is ignored: %s", error)
            return
        if sent_at <= self._newest.get(registration.url, 0.0):
            return
        self._newest[registration.url] = sent_at
        if leaving:
            self._registered.pop(registration.url, None)
        else:
            self._registered[registration.url] = registration


def _listen(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _LISTEN_PATIENCE_S
    while True:
        try:
            return socket.create_server((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def announce(address: str, api_key: str, registrations: Sequence[Registration], *, leaving: bool = False) -> bool:
    """The engines' side: tell the trainer at `address` of engines that serve, or leave. False: no trainer is there."""
    host, port = parse_address(address)
    try:
        # The store's own client would retry for long and log each attempt.
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S) as connection:
            # A connection that the system gives this very port meets itself where nobody listens. An ordinary close
            # would keep the trainer from the port for a minute.
            if connection.getsockname() == connection.getpeername():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_TIMEOUT_S)
        )
        for registration in registrations:
            store.queue_push(_QUEUE, _signed(registration, leaving, api_key))
    except (OSError, DistError):
        return False
    return True


def _signed(registration: Registration, leaving: bool, api_key: str) -> bytes:
    body = json.dumps({"registration": asdict(registration), "sent_at": time.time(), "leaving": leaving}).encode()
    return _signature(body, api_key) + body


class _RefusedError(Exception):
    pass


def _verified(message: bytes, api_key: str) -> tuple[Registration, float, bool]:
    """(registration, time it was signed at, whether the engine leaves). Raises _RefusedError."""
    length = hashlib.sha256().digest_size
    body = message[length:]
    if not hmac.compare_digest(message[:length], _signature(body, api_key)):
        raise _RefusedError("it is not signed with this run's API key; give the engines the trainer's key")
    fields = json.loads(body)
    if abs(time.time() - fields["sent_at"]) > _MAX_AGE_S:
        raise _RefusedError(
            f"it was signed over {_MAX_AGE_S:.0f} s ago; where it is new, set the machines' clocks right"
        )
    return Registration(**fields["registration"]), fields["sent_at"], fields["leaving"]


def _signature(body: bytes, api_key: str) -> bytes:
    return hmac.digest(api_key.encode(), b"dapo_mega announcement\n" + body, "sha256")
