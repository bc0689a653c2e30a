"""Messages between the sandbox's processes: JSON with its length before it, on file descriptors, never read ahead."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

MAX_BYTES = 64 * 2**20
HEAD = struct.Struct("=I")
"""The length of a message's body, which stands before it."""


class FrameError(Exception):
    """What came is no message: cut off, too long, or not JSON."""


def framed(message: Any) -> bytes:
    """A message as it travels."""
    body = json.dumps(message).encode()
    if len(body) > MAX_BYTES:
        raise FrameError(f"a message of {len(body):,} bytes is too long")
    return HEAD.pack(len(body)) + body


def write_frame(descriptor: int, message: Any) -> None:
    """Write a message; waits while the other side does not read."""
    write_all(descriptor, framed(message))


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of the bytes, which one system call may not do."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int) -> Any | None:
    """The next message; None where the other side has closed."""
    head = _read(descriptor, HEAD.size)
    if not head:
        return None
    if len(head) < HEAD.size:
        raise FrameError("a message was cut off")
    (length,) = HEAD.unpack(head)
    if length > MAX_BYTES:
        raise FrameError(f"a message of {length:,} bytes is too long")
    body = _read(descriptor, length)
    if len(body) < length:
        raise FrameError("a message was cut off")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a message cannot be read: {error}") from None


def _read(descriptor: int, length: int) -> bytes:
    """Exactly so many bytes, or fewer at the end. What follows them may be for another process."""
    parts = []
    while length > 0 and (part := os.read(descriptor, min(length, 2**20))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
