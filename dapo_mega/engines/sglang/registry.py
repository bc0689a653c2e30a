"""Registers the engines that announce themselves at the trainer's rendezvous address.

Announcements are signed with the API key and repeated, so that a restarted trainer finds its engines. Clients without
the key can only delay announcements: nothing that they send is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from dapo_mega.config.fleet import parse_address
from dapo_mega.engines.sglang.announcements import (
    MAX_AGE_S,
    MAX_MESSAGE_BYTES,
    MAX_REGISTRATIONS,
    RefusedAnnouncement,
    Registration,
    signed_announcement,
    signed_reply,
    verified_announcement,
    verified_reply,
)
from dapo_mega.engines.sglang.rendezvous import PostServer, post
from dapo_mega.errors import InputError

logger = logging.getLogger(__name__)

_MAX_ENGINES = 4096
_REFUSALS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "refuses the announcement: its API key is another one",
    HTTPStatus.CONFLICT: f"refuses the announcement: the machines' clocks differ by more than {MAX_AGE_S:.0f} s",
}


class EngineRegistry:
    """The trainer's side: listens on `address` (this interface only) for engines that have the API key.

    Raises InputError if it cannot listen on the address within a few seconds.
    """

    def __init__(self, address: str, api_key: str) -> None:
        self._api_key = api_key
        self._lock = threading.Lock()
        self._registered: dict[str, Registration] = {}
        self._newest: dict[str, float] = {}
        self._hung: frozenset[str] = frozenset()
        self._refusals: set[str] = set()
        host, port = parse_address(address)
        try:
            self._server = PostServer(host, port, self._receive, MAX_MESSAGE_BYTES)
        except OSError as error:
            raise InputError(
                f"cannot listen on rollout.fleet.rendezvous={address} ({error.strerror}); give an address of this "
                "machine and a free port outside of those that engines (22000 to 29999) and the system (on Linux from "
                "32768) use"
            ) from error

    def poll(self) -> list[Registration]:
        """The engines registered now. Does not wait."""
        with self._lock:
            return list(self._registered.values())

    def report_hung(self, instances: Iterable[str]) -> None:
        """From now on tell launchers that these instances have been hung for long."""
        self._hung = frozenset(instances)

    def close(self) -> None:
        self._server.close()

    def _receive(self, message: bytes) -> tuple[HTTPStatus, bytes]:
        try:
            announcement = verified_announcement(message, self._api_key)
            with self._lock:
                for registration in announcement.registrations:
                    self._take(registration, announcement.sent_at, announcement.leaving)
        except RefusedAnnouncement as error:
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                logger.warning("an engine's announcement is ignored: %s", error)
            return error.status, b""
        return HTTPStatus.OK, signed_reply(message, self._hung, self._api_key)

    def _take(self, registration: Registration, sent_at: float, leaving: bool) -> None:
        url = registration.url
        if sent_at <= self._newest.get(url, 0.0):
            return
        if url not in self._newest and len(self._newest) >= _MAX_ENGINES:
            # Engines that have left are forgotten where an older announcement has expired anyway.
            expired = time.time() - MAX_AGE_S
            self._newest = {u: at for u, at in self._newest.items() if u in self._registered or at > expired}
            if len(self._newest) >= _MAX_ENGINES:
                raise RefusedAnnouncement(HTTPStatus.INSUFFICIENT_STORAGE, f"{_MAX_ENGINES} engines are known already")
        self._newest[url] = sent_at
        if leaving:
            self._registered.pop(url, None)
        else:
            self._registered[url] = registration


@dataclass(frozen=True)
class TrainerReply:
    """A trainer's reply to an announcement: a `refusal`, or the instances that have been hung for long."""

    refusal: str = ""
    hung: frozenset[str] = frozenset()


def announce(
    address: str, api_key: str, registrations: Sequence[Registration], *, leaving: bool = False
) -> TrainerReply | None:
    """The engines' side: tell the trainer at `address` which engines serve or leave. None if no trainer answers."""
    host, port = parse_address(address)
    hung: frozenset[str] = frozenset()
    for start in range(0, len(registrations), MAX_REGISTRATIONS):
        message = signed_announcement(registrations[start : start + MAX_REGISTRATIONS], leaving, api_key)
        if (answer := post(host, port, message)) is None:
            return None
        status, content = answer
        if status != HTTPStatus.OK:
            # Only the status is used: the rest is not authenticated.
            return TrainerReply(_REFUSALS.get(status, f"refuses the announcement (HTTP {status})"))
        if (named := verified_reply(message, content, api_key)) is None:
            return TrainerReply("does not have this API key")
        hung |= named
    return TrainerReply(hung=hung)
