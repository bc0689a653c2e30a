"""The messages between engine launchers and the trainer, signed with the API key, which is never sent.

A message is a SHA-256 HMAC followed by JSON. Without the key one can only replay a message. A replay counts only while
the message is fresh and the newest one about its engine. A reply is valid for one announcement only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter

from dapo_mega.config.components.servers import url_problem

MAX_MESSAGE_BYTES = 8192
MAX_REGISTRATIONS = 16
"""Engines per message: as many as fit into MAX_MESSAGE_BYTES."""
MAX_AGE_S = 300.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_ANNOUNCEMENT, _REPLY = b"dapo_mega announcement\n", b"dapo_mega reply\n"


def _bare(url: str) -> str:
    """The URL if it is scheme, host and port only. Raises ValueError."""
    parts = urlsplit(url)
    if url_problem(url) or not parts.port or url != f"{parts.scheme}://{parts.netloc}":
        raise ValueError("no URL of an engine")
    return url


@dataclass(frozen=True)
class Registration:
    """An engine. Each start of an engine at the same `url` has another `instance`."""

    url: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,300}$"), AfterValidator(_bare)]
    instance: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{1,64}$")]


@dataclass(frozen=True)
class Announcement:
    """The engines that serve, or that stop if `leaving`. `sent_at` is the sender's time in seconds since the epoch."""

    registrations: Annotated[tuple[Registration, ...], Field(max_length=MAX_REGISTRATIONS)]
    leaving: bool
    sent_at: Annotated[float, Field(allow_inf_nan=False)]


_ANNOUNCED: Final = TypeAdapter(Announcement)


class RefusedAnnouncement(Exception):
    """Why an announcement is refused; the text quotes nothing from the message."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def signed_announcement(registrations: Sequence[Registration], leaving: bool, api_key: str) -> bytes:
    """The message that announces at most MAX_REGISTRATIONS engines now."""
    fields = {"registrations": [asdict(r) for r in registrations], "leaving": leaving, "sent_at": time.time()}
    return _signed(_ANNOUNCEMENT, json.dumps(fields).encode(), api_key)


def verified_announcement(message: bytes, api_key: str) -> Announcement:
    """The announcement in a `signed_announcement`. Raises RefusedAnnouncement, and nothing else for any message."""
    if (body := _verified(_ANNOUNCEMENT, message, api_key)) is None:
        raise RefusedAnnouncement(
            HTTPStatus.UNAUTHORIZED, "not signed with this run's API key; give the engines the trainer's key"
        )
    try:
        announcement = _ANNOUNCED.validate_json(body, strict=True)
    except ValueError:
        raise RefusedAnnouncement(
            HTTPStatus.BAD_REQUEST,
            "signed with this run's API key but malformed; start the engines with the trainer's version of "
            "launch/serve_rollouts.py",
        ) from None
    if abs(time.time() - announcement.sent_at) > MAX_AGE_S:
        raise RefusedAnnouncement(
            HTTPStatus.CONFLICT,
            f"signed more than {MAX_AGE_S:.0f} s ago, or the machines' clocks differ; synchronise the clocks",
        )
    return announcement


def signed_reply(message: bytes, hung: Iterable[str], api_key: str) -> bytes:
    """The trainer's reply to the announcement `message`: all instances that have been hung for long."""
    return _signed(_REPLY + hashlib.sha256(message).digest(), json.dumps({"hung": sorted(hung)}).encode(), api_key)


def verified_reply(message: bytes, reply: bytes, api_key: str) -> frozenset[str] | None:
    """The hung instances in a `signed_reply` to `message`; None if the signature is wrong."""
    body = _verified(_REPLY + hashlib.sha256(message).digest(), reply, api_key)
    return None if body is None else frozenset(json.loads(body)["hung"])


def _signed(context: bytes, body: bytes, api_key: str) -> bytes:
    return hmac.digest(api_key.encode(), context + body, "sha256") + body


def _verified(context: bytes, message: bytes, api_key: str) -> bytes | None:
    """The body of a `_signed` message; None if the signature is wrong."""
    body = message[_DIGEST_BYTES:]
    expected = hmac.digest(api_key.encode(), context + body, "sha256")
    return body if hmac.compare_digest(message[:_DIGEST_BYTES], expected) else None
