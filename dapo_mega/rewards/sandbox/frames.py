"""Messages between the sandbox's processes: JSON with its length before it, on file descriptors, never read ahead."""

import json
import os
import select
import struct
import time
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
    body = read_body(descriptor)
    return None if body is None else _parsed(body)


def read_body(descriptor: int, most: int = MAX_BYTES) -> bytes | None:
    """The bytes of the next message; None where the other side has closed."""
    head = _read(descriptor, HEAD.size)
    if not head:
        return None
    if len(head) < HEAD.size:
        raise FrameError("a message was cut off")
    body = _read(descriptor, _length(head, most))
    if len(body) < _length(head, most):
        raise FrameError("a message was cut off")
    return body


def send_before(deadline: float, descriptor: int, content: bytes) -> None:
    """Write all of the bytes to a descriptor that does not block, or raise TimeoutError at the `time.monotonic()` of
    `deadline`. Raises OSError where the other side has closed."""
    rest = memoryview(content)
    while rest:
        _wait_for(descriptor, select.POLLOUT, deadline)
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            continue


def receive_before(deadline: float, descriptor: int) -> Any:
    """The next message from a descriptor that does not block. Raises TimeoutError where it is not complete at the
    `time.monotonic()` of `deadline`, OSError where the other side has closed, FrameError."""
    head = _receive(deadline, descriptor, HEAD.size)
    return _parsed(_receive(deadline, descriptor, _length(head, MAX_BYTES)))


def _receive(deadline: float, descriptor: int, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        _wait_for(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, min(length - len(content), 2**20))
        if not part:
            raise ConnectionResetError("the other side has closed")
        content += part
    return bytes(content)


def _wait_for(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _length(head: bytes, most: int) -> int:
    (length,) = HEAD.unpack(head)
    if length > most:
        raise FrameError(f"a message of {length:,} bytes is too long")
    return int(length)


def _parsed(body: bytes) -> Any:
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
