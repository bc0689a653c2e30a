"""HTTP connections to servers that may send anything: what is not an answer's content is bounded, too."""

import asyncio
import re
import resource
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError, RawResponseMessage
from aiohttp.streams import EMPTY_PAYLOAD
from yarl import URL

T = TypeVar("T")

_SPARE_BYTES = 2**20
_KEEP_ALIVE_S = 2.0  # Servers close idle connections after 5 s; a request sent at that moment would fail.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def raise_file_limit() -> int:
    """Let this process have as many files open, connections included, as it may; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


class _BoundedHandler(ResponseHandler):
    """Ends a connection on which one answer has _SPARE_BYTES that nobody reads: interim answers, empty lines, what
    chunks have beside their content. aiohttp bounds lines and headers only, and reads on until the
    request's time limit."""

    _num_received = 0

    def set_response_params(self, **params: Any) -> None:
        """A new request begins."""
        self._num_received = 0
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. Content is bounded by those who read it, which slows the connection down."""
        self._num_received += len(data)
        super().data_received(data)
        reading = None if self._payload is EMPTY_PAYLOAD else self._payload
        content = reading.total_bytes if reading else 0
        if self._num_received - content > _SPARE_BYTES and self.transport:
            reason = f"more than {_SPARE_BYTES:,} bytes are no content"
            if reading:
                reading.set_exception(aiohttp.ClientPayloadError(reason))
            self.set_exception(HttpProcessingError(message=reason))
            self.transport.abort()


def _open_connector() -> aiohttp.TCPConnector:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    connector._factory = cast(Any, partial(_BoundedHandler, loop=asyncio.get_running_loop()))
    return connector


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """A session without a limit of connections, which keeps no cookies and unpacks nothing. On a running loop."""
    return aiohttp.ClientSession(
        connector=_open_connector(), headers=headers, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    )


class Caller:
    """Calls one server as a session of `open_session` would, at less than half of its CPU time: connections, TLS and
    the parsing of answers are aiohttp's, and what all requests of a path share is made once. On a running loop."""

    def __init__(self, url: str, headers: Mapping[str, str], connect_timeout_s: float) -> None:
        self._url = url
        self._headers = headers
        self._limits = aiohttp.ClientTimeout(sock_connect=connect_timeout_s)
        self._connector = _open_connector()
        self._made: dict[tuple[str, str], tuple[aiohttp.ClientRequest, bytes]] = {}

    async def call(
        self,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[RawResponseMessage, aiohttp.StreamReader], Awaitable[T]],
    ) -> T:
        """What `read` makes of the head and the content of the answer. `content` is JSON.

        Redirects are not followed, and the caller limits the time. Raises what aiohttp raises, HttpProcessingError for
        an answer that is not HTTP, and ValueError for headers that cannot be sent. What is not read to its end, as
        after an error, ends the connection.
        """
        request, head = self._made.get((method, path)) or self._make(method, path)
        try:
            connection = await self._connector.connect(request, [], self._limits)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {request.url}") from error
        try:
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None:
                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(read_until_eof=True, auto_decompress=False)
            transport.write(
                head + (b"\r\n" if content is None else b"Content-Length: %d\r\n\r\n" % len(content) + content)
            )
            message, payload = await protocol.read()
            while 100 <= message.code < 200 and message.code != 101:
                message, payload = await protocol.read()
            answer = await read(message, payload)
        except BaseException:
            connection.close()
            raise
        connection.release()
        return answer

    async def close(self) -> None:
        await self._connector.close()

    def _make(self, method: str, path: str) -> tuple[aiohttp.ClientRequest, bytes]:
        """What connects to the server, and the request's lines but for the content's length."""
        try:
            url = URL(self._url + path)
        except ValueError as error:
            raise aiohttp.InvalidURL(self._url) from error
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise aiohttp.InvalidURL(url)
        if url.raw_user is not None or url.raw_password is not None:
            raise ValueError("a user in the URL")
        request = aiohttp.ClientRequest("GET", url, headers=self._headers, loop=asyncio.get_running_loop())
        headers = {**request.headers, **({} if method == "GET" else {"Content-Type": "application/json"})}
        lines = [f"{method} {url.raw_path_qs} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if any(map(_CONTROL.search, lines)):
            raise ValueError("a control character in the headers")
        made = self._made[method, path] = request, "".join(f"{line}\r\n" for line in lines).encode()
        return made
