"""The HTTP server and client with which an engine launcher posts an announcement and the trainer answers.

Everyone who reaches the trainer's address can connect, so bytes, time and number of connections are bounded. Above the
limit the oldest connection is closed, as an honest one takes milliseconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import struct
import time
from collections.abc import Callable
from http import HTTPStatus

from dapo_mega.engines.sglang.event_loop import LoopThread

logger = logging.getLogger(__name__)

_PATH = "/engines"
_MAX_HEAD_BYTES = 2048
_MAX_CONNECTIONS = 64
_LIMIT_S = 2.0
_LISTEN_PATIENCE_S = 10.0
_MAX_REPLY_BYTES = 65536
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9})\r\n", re.IGNORECASE)

Handler = Callable[[bytes], tuple[HTTPStatus, bytes]]


class PostServer:
    """Answers POST requests, one per connection, in its own thread."""

    def __init__(self, host: str, port: int, handle: Handler, max_body_bytes: int) -> None:
        """Listen on this address only. `handle` gives status and content for a body, in the server's thread.

        Waits a while for an address in use, which a trainer that has just ended may still hold. Raises OSError if it
        cannot listen on the address.
        """
        listener = _listen(host, port)
        self._handle = handle
        self._max_body_bytes = max_body_bytes
        self._is_warned = False
        self._connections: dict[asyncio.StreamWriter, None] = {}
        self._thread = LoopThread("rendezvous")
        start = asyncio.start_server(self._serve, sock=listener, limit=_MAX_HEAD_BYTES)
        self._server = self._thread.run(start)

    def close(self) -> None:
        """Stop listening and break the connections."""
        if not self._thread.loop.is_closed():
            self._thread.run(self._close())
            self._thread.close()

    async def _close(self) -> None:
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        try:
            async with asyncio.timeout(_LIMIT_S):
                status, content = await self._answer(reader)
                head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {len(content)}\r\n"
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + content)
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError):  # TimeoutError included.
            pass  # The client is gone or too slow.
        finally:
            self._connections.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[HTTPStatus, bytes]:
        start = await reader.readexactly(5)
        if start != b"POST ":
            is_http = start[:4] in (b"GET ", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC")
            if not is_http and not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "the rendezvous got a call that is not HTTP; if it came from an older launch/serve_rollouts.py, "
                    "use the trainer's version"
                )
            return HTTPStatus.METHOD_NOT_ALLOWED, b"engines of a dapo_mega run are announced here\n"
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b""
        if head.split(b" ", 1)[0] != _PATH.encode():
            return HTTPStatus.NOT_FOUND, b""
        length = _CONTENT_LENGTH.search(head)
        if not length:
            return HTTPStatus.LENGTH_REQUIRED, b""
        if int(length[1]) > self._max_body_bytes:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b""
        return self._handle(await reader.readexactly(int(length[1])))


def post(host: str, port: int, body: bytes) -> tuple[int, bytes] | None:
    """(status, content) of the answer; None if no HTTP server answers. Takes a few seconds at most."""
    deadline = time.monotonic() + _LIMIT_S
    head = f"POST {_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((host, port), timeout=_LIMIT_S) as connection:
            # A connection that the system gives this very port meets itself where nobody listens. An ordinary close
            # would keep the trainer from the port for a minute.
            if connection.getsockname() == connection.getpeername():
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            connection.sendall(head.encode() + body)
            received = _receive(connection, deadline)
    except OSError:
        return None
    status = _STATUS_LINE.match(received)
    return (int(status[1]), received.partition(b"\r\n\r\n")[2]) if status else None


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """All bytes until the connection ends. Raises TimeoutError after the deadline."""
    received = b""
    while len(received) < _MAX_REPLY_BYTES:
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        if not (piece := connection.recv(_MAX_REPLY_BYTES)):
            break
        received += piece
    return received


def _listen(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _LISTEN_PATIENCE_S
    while True:
        try:
            return socket.create_server((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.1)
