"""Posts JSON to one of several equal servers: at the same time, within a deadline, again elsewhere after a failure."""

import asyncio
import json
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np

from dapo_mega.config.components.servers import ServerKeys, url_problem
from dapo_mega.distributed.event_loops import outer_loop_set_aside
from dapo_mega.errors import InputError
from dapo_mega.rewards.bounded_http import open_session

_MAX_ANSWER_BYTES = 16 * 2**20
_MAX_REASON_CHARACTERS = 300
_CONNECT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)


@dataclass(frozen=True)
class EndpointSettings:
    """Equal servers and how to ask them. The key is read from an environment variable or a file, if one is named.

    `timeout_s` limits one attempt, `deadline_s` everything that is asked at once, `attempts` how often one thing is.
    """

    urls: tuple[str, ...]
    api_key_env: str | None = None
    api_key_file: str | None = None
    concurrency: int = 64
    timeout_s: float = 60.0
    deadline_s: float = 300.0
    attempts: int = 3

    @classmethod
    def of(cls, keys: ServerKeys) -> Self:
        """Those of a reward or a teacher."""
        return cls(**keys.model_dump(include={field.name for field in fields(cls)}))


@dataclass(frozen=True)
class Unanswered:
    """No server gave an answer that can be used; `reason` is one line without secrets."""

    reason: str


Read = Callable[[Mapping[str, Any], Any], Any]
"""What a request's answer, parsed JSON, says. Raises ValueError for one that does not fit; another server may do
better."""


def read_key(variable: str | None, file: str | None) -> str | None:
    """The key that a variable or file holds; None where neither is named. Raises InputError where it is not there."""
    if variable and file:
        raise InputError("api_key_env and api_key_file are both given; keep one")
    if variable:
        key, place = os.environ.get(variable, ""), f"the environment variable {variable}"
    elif file:
        place = f"the file {file}"
        try:
            key = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"api_key_file: {place} cannot be read: {type(error).__name__}") from None
    else:
        return None
    key = key.strip()
    if not key:
        raise InputError(f"{place} holds no key; set it, or leave out api_key_env and api_key_file")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"the key in {place} has characters that no key has, such as spaces")
    return key


class Endpoints:
    """Servers that answer the same requests. Raises InputError for a bad URL or key."""

    def __init__(self, settings: EndpointSettings, read: Read, path: str = "") -> None:
        """`path` is added to each URL that does not end with it."""
        self._read = read
        if not settings.urls:
            raise InputError("urls is empty; give at least one")
        for number, url in enumerate(settings.urls):
            if problem := url_problem(url):
                raise InputError(f"urls[{number}] {problem}")
        self._urls = [_with_path(url, path) for url in settings.urls]
        self._settings = settings
        self._key = read_key(settings.api_key_env, settings.api_key_file)
        self._failures: Counter[str] = Counter()
        """By server: attempts that failed since the last one that did not."""
        self._in_flight: Counter[str] = Counter()

    def post_all(
        self, bodies: Sequence[Mapping[str, Any]], on_answer: Callable[[int, Any], None] = lambda index, answer: None
    ) -> list[Any | Unanswered]:
        """What `read` made of the servers' answers, in order. `on_answer` gets each with its index as soon as it is
        there, but not what is `Unanswered`; what it raises is raised at the end."""
        if not bodies:
            return []
        with outer_loop_set_aside():
            return asyncio.run(self._post_all(bodies, on_answer))

    async def _post_all(
        self, bodies: Sequence[Mapping[str, Any]], on_answer: Callable[[int, Any], None]
    ) -> list[Any | Unanswered]:
        # What is not unpacked cannot grow: half a megabyte of gzip may hold a gigabyte.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._free = asyncio.Semaphore(self._settings.concurrency)
        async with open_session(headers) as session:

            async def answered(index: int) -> Any | Unanswered:
                answer = await self._post(session, bodies[index])
                if not isinstance(answer, Unanswered):
                    on_answer(index, answer)
                return answer

            tasks = [asyncio.create_task(answered(index)) for index in range(len(bodies))]
            await asyncio.wait(tasks, timeout=self._settings.deadline_s)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        late = Unanswered(f"not answered within deadline_s={self._settings.deadline_s:g}")
        return [late if task.cancelled() else task.result() for task in tasks]

    async def _post(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Any | Unanswered:
        tried: list[str] = []
        refused: set[str] = set()
        reason = ""
        for attempt in range(self._settings.attempts):
            urls = [url for url in self._urls if url not in refused]
            if not urls:
                break
            if attempt >= len(urls):
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - len(urls)), _LONGEST_PAUSE_S))
            async with self._free:
                # Not one that failed for this request while there is another; then what works, and has least to do.
                url = min(urls, key=lambda url: (tried.count(url), self._failures[url] > 0, self._in_flight[url]))
                tried.append(url)
                try:
                    return await self._attempt(session, url, body)
                except _AttemptFailed as failure:
                    text = f"{url.partition('?')[0]}: {failure}"
                    # Without the key, which a server may have sent back.
                    reason = one_line(text.replace(self._key, "<key>") if self._key else text)
                    if failure.is_final:
                        refused.add(url)
        times = f" (after {len(tried)} attempts)" if len(tried) > 1 else ""
        return Unanswered(reason + times)

    async def _attempt(self, session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
        content = json.dumps(plain(body)).encode()
        limits = aiohttp.ClientTimeout(total=self._settings.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        async with (
            self._counted(url),
            session.post(url, data=content, timeout=limits, allow_redirects=False) as response,
        ):
            if (encoding := response.headers.get("Content-Encoding", "identity").lower()) != "identity":
                raise _AttemptFailed(f"the answer is packed with {encoding}, which the request did not allow")
            received = bytearray()
            async for chunk in response.content.iter_chunked(2**16):
                received += chunk
                if len(received) > _MAX_ANSWER_BYTES:
                    raise _AttemptFailed(f"the answer is longer than {_MAX_ANSWER_BYTES:,} bytes")
            if response.status != HTTPStatus.OK:
                excerpt = received[:2000].decode(errors="replace")
                is_final = response.status < HTTPStatus.INTERNAL_SERVER_ERROR and response.status not in _BUSY
                raise _AttemptFailed(f"HTTP {response.status}: {excerpt}", is_final)
            try:
                answer = json.loads(received)
            except (ValueError, RecursionError):
                excerpt = received[:200].decode(errors="replace")
                raise _AttemptFailed(f"the answer is not JSON: {excerpt}") from None
            try:
                return self._read(body, answer)
            except ValueError as error:
                raise _AttemptFailed(str(error)) from None

    @asynccontextmanager
    async def _counted(self, url: str) -> AsyncIterator[None]:
        """Counts the attempt, and turns what aiohttp raises into _AttemptFailed."""
        self._in_flight[url] += 1
        try:
            try:
                yield
            except aiohttp.ClientSSLError as error:
                raise _AttemptFailed(f"no TLS connection: {error}") from None
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise _AttemptFailed(f"no connection: {error}") from None
            except TimeoutError:
                raise _AttemptFailed(f"no complete answer within timeout_s={self._settings.timeout_s:g}") from None
            except aiohttp.ClientResponseError as error:
                raise _AttemptFailed(f"the answer is not HTTP: {error.message}") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _AttemptFailed(f"the connection broke: {error!r}") from None
        except _AttemptFailed:
            self._failures[url] += 1
            raise
        else:
            self._failures[url] = 0
        finally:
            self._in_flight[url] -= 1


class _AttemptFailed(Exception):
    """One server did not answer one request. `is_final`: it would not the next time either."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


def one_line(text: str) -> str:
    """A text of limited length as one printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:5000]).split())
    return line if len(line) <= _MAX_REASON_CHARACTERS else line[: _MAX_REASON_CHARACTERS - 3] + "..."


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, numbers that JSON does not have as null, all else as text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return value.tolist()  # Not one by one: a response has thousands of tokens.
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return str(value)


def _with_path(url: str, path: str) -> str:
    head, question, query = url.partition("?")
    head = head.rstrip("/")
    return head + ("" if head.endswith(path) else path) + question + query
