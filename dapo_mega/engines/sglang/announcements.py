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
from typing import Any
from urllib.parse import urlsplit

MAX_MESSAGE_BYTES = 8192
MAX_REGISTRATIONS = 16
"""Engines per message: as many as fit into MAX_MESSAGE_BYTES."""
MAX_AGE_S = 300.0
_MAX_URL_LENGTH = 300
_MAX_INSTANCE_LENGTH = 64
_DIGEST_BYTES = hashlib.sha256().digest_size
_ANNOUNCEMENT, _REPLY = b"dapo_mega announcement\n", b"dapo_mega reply\n"


@dataclass(frozen=True)
class Registration:
    """An engine. Each start of an engine at the same `url` has another `instance`."""

    url: str
    instance: str


@dataclass(frozen=True)
class Announcement:
    """The engines that serve, or that stop if `leaving`. `sent_at` is the sender's time in seconds since the epoch."""

    registrations: tuple[Registration, ...]
    leaving: bool
    sent_at: float


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
        announcement = _announcement(json.loads(body))
    except (ValueError, RecursionError):  # Not JSON, not a URL, or nested too deeply.
        announcement = None
    if announcement is None:
        raise RefusedAnnouncement(
            HTTPStatus.BAD_REQUEST,
            "signed with this run's API key but malformed; start the engines with the trainer's version of "
            "launch/serve_rollouts.py",
        )
    if abs(time.time() - announcement.sent_at) > MAX_AGE_S:
        raise RefusedAnnouncement(
            HTTPStatus.CONFLICT,
            f"signed more than {MAX_AGE_S:.0f} s ago, or the machines' clocks differ; synchronise the clocks",
        )
    return announcement


def signed_reply(message: bytes, hung: Iterable[str], api_key: str) -> bytes:
    """The trainer's reply to the announcement `message`: all instances that have been hung for long."""
    return _signed(_REPLY + _digest(message), json.dumps({"hung": sorted(hung)}).encode(), api_key)


def verified_reply(message: bytes, reply: bytes, api_key: str) -> frozenset[str] | None:
    """The hung instances in a `signed_reply` to `message`; None if the signature is wrong."""
    body = _verified(_REPLY + _digest(message), reply, api_key)
    return None if body is None else frozenset(json.loads(body)["hung"])


def _announcement(fields: Any) -> Announcement | None:
    """None when the fields are not those of an announcement."""
    if not isinstance(fields, dict):
        return None
    given, leaving, sent_at = (fields.get(name) for name in ("registrations", "leaving", "sent_at"))
    # json reads NaN, which is not equal to itself.
    if not isinstance(given, list) or type(leaving) is not bool or type(sent_at) is not float or sent_at != sent_at:
        return None
    registrations = [_registration(entry) for entry in given[: MAX_REGISTRATIONS + 1]]
    valid = tuple(registration for registration in registrations if registration)
    if len(valid) != len(registrations) or len(valid) > MAX_REGISTRATIONS:
        return None
    return Announcement(valid, leaving, sent_at)


def _registration(fields: Any) -> Registration | None:
    if not isinstance(fields, dict):
        return None
    url, instance = fields.get("url"), fields.get("instance")
    if not isinstance(url, str) or not _is_engine_url(url) or not isinstance(instance, str):
        return None
    if not (instance.isascii() and instance.isalnum() and len(instance) <= _MAX_INSTANCE_LENGTH):
        return None
    return Registration(url, instance)


def _is_engine_url(url: str) -> bool:
    """Whether the URL is scheme, host and port only. ValueError from urllib means no."""
    if len(url) > _MAX_URL_LENGTH or not url.isascii() or not url.isprintable() or " " in url:
        return False
    parts = urlsplit(url)
    is_bare = parts.geturl() == url and parts.netloc == url.removeprefix(f"{parts.scheme}://") and "@" not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port) and is_bare


def _signed(context: bytes, body: bytes, api_key: str) -> bytes:
    return hmac.digest(api_key.encode(), context + body, "sha256") + body


def _verified(context: bytes, message: bytes, api_key: str) -> bytes | None:
    """The body of a `_signed` message; None if the signature is wrong."""
    body = message[_DIGEST_BYTES:]
    expected = hmac.digest(api_key.encode(), context + body, "sha256")
    return body if hmac.compare_digest(message[:_DIGEST_BYTES], expected) else None


def _digest(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()
