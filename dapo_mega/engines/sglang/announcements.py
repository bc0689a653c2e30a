"""What launchers of engines tell the trainer and what it answers, signed with the API key, which itself never travels.

A message is a SHA-256 HMAC followed by JSON. Whoever lacks the key can only send one again as it was, which counts
while it is fresh and nothing newer is known of the engine; an answer is valid for its announcement only.
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
"""Of one message: so many fit."""
MAX_AGE_S = 300.0
_MAX_URL_LENGTH = 300
_MAX_INSTANCE_LENGTH = 64
_DIGEST_BYTES = hashlib.sha256().digest_size
_ANNOUNCEMENT, _REPLY = b"dapo_mega announcement\n", b"dapo_mega reply\n"


@dataclass(frozen=True)
class Registration:
    """An engine. `instance` differs between two starts of the engine at the same `url`."""

    url: str
    instance: str


@dataclass(frozen=True)
class Announcement:
    """These engines serve, or are `leaving`. `sent_at` is the sender's time in seconds since the epoch."""

    registrations: tuple[Registration, ...]
    leaving: bool
    sent_at: float


class RefusedAnnouncement(Exception):
    """Why an announcement does not count; nothing that a stranger has written is in it."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def signed_announcement(registrations: Sequence[Registration], leaving: bool, api_key: str) -> bytes:
    """The message that announces at most MAX_REGISTRATIONS engines now."""
    fields = {"registrations": [asdict(r) for r in registrations], "leaving": leaving, "sent_at": time.time()}
    return _signed(_ANNOUNCEMENT, json.dumps(fields).encode(), api_key)


def verified_announcement(message: bytes, api_key: str) -> Announcement:
    """Of `signed_announcement`. Raises RefusedAnnouncement, and nothing else whatever the message is."""
    if (body := _verified(_ANNOUNCEMENT, message, api_key)) is None:
        raise RefusedAnnouncement(
            HTTPStatus.UNAUTHORIZED, "it is not signed with this run's API key; give the engines the trainer's key"
        )
    try:
        announcement = _announcement(json.loads(body))
    except (ValueError, RecursionError):  # Of the message's form, or from json: nested too deeply.
        announcement = None
    if announcement is None:
        raise RefusedAnnouncement(
            HTTPStatus.BAD_REQUEST,
            "it is signed with this run's API key but malformed; start the engines with the trainer's version of "
            "launch/serve_rollouts.py",
        )
    if abs(time.time() - announcement.sent_at) > MAX_AGE_S:
        raise RefusedAnnouncement(
            HTTPStatus.CONFLICT,
            f"it was signed over {MAX_AGE_S:.0f} s ago; where it is new, set the machines' clocks right",
        )
    return announcement


def signed_reply(message: bytes, hung: Iterable[str], api_key: str) -> bytes:
    """The trainer's answer to the announcement `message`: which of all instances have been hung for long."""
    return _signed(_REPLY + _digest(message), json.dumps({"hung": sorted(hung)}).encode(), api_key)


def verified_reply(message: bytes, reply: bytes, api_key: str) -> frozenset[str] | None:
    """The instances of `signed_reply` to `message`; None where it is not from a trainer that has the key."""
    body = _verified(_REPLY + _digest(message), reply, api_key)
    return None if body is None else frozenset(json.loads(body)["hung"])


def _announcement(fields: Any) -> Announcement | None:
    """None when the fields are not those of an announcement."""
    if not isinstance(fields, dict):
        return None
    given, leaving, sent_at = (fields.get(name) for name in ("registrations", "leaving", "sent_at"))
    # NaN, which json reads, is no number that anything is near to.
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
    """Whether it is scheme, host and port, and nothing else. ValueError from urllib means no."""
    if len(url) > _MAX_URL_LENGTH or not url.isascii() or not url.isprintable() or " " in url:
        return False
    parts = urlsplit(url)
    is_bare = parts.geturl() == url and parts.netloc == url.removeprefix(f"{parts.scheme}://") and "@" not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port) and is_bare


def _signed(context: bytes, body: bytes, api_key: str) -> bytes:
    return hmac.digest(api_key.encode(), context + body, "sha256") + body


def _verified(context: bytes, message: bytes, api_key: str) -> bytes | None:
    """The body of a `_signed` message; None when the signature is not right."""
    body = message[_DIGEST_BYTES:]
    expected = hmac.digest(api_key.encode(), context + body, "sha256")
    return body if hmac.compare_digest(message[:_DIGEST_BYTES], expected) else None


def _digest(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()
