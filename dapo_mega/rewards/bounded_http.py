"""HTTP connections to servers that may send anything: what is not an answer's content is bounded, too."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD

_SPARE_BYTES = 2**20
_KEEP_ALIVE_S = 2.0  # Servers close idle connections after 5 s; a request sent at that moment would fail.


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


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """A session without a limit of connections, which keeps no cookies and unpacks nothing. On a running loop."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    connector._factory = cast(Any, partial(_BoundedHandler, loop=asyncio.get_running_loop()))
    return aiohttp.ClientSession(
        connector=connector, headers=headers, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    )
