"""The HTTP client of one SGLang server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Literal

import aiohttp
import orjson
from aiohttp.http import HttpProcessingError, RawResponseMessage

from dapo_mega.engines.sglang.engine_model import described_model
from dapo_mega.engines.sglang.weight_protocol import PROTOCOL, PROTOCOL_FIELD
from dapo_mega.rewards.bounded_http import Caller

_CONNECT_TIMEOUT_S = 30.0
_SHORT_TIMEOUT_S = 60.0
# An answer may have this much, and for each token that was asked for its id, its log-prob and its text.
_ANSWER_BYTES = 4 * 2**20
_TOKEN_BYTES = 512
_EXCERPT_BYTES = 2000  # Read from an error's answer; the line that quotes it is shorter.
_PAGE = "a page for browsers"
_RESERVED_POSITIONS = 6  # SGLang's max_req_input_len is this much below its limit for prompt and response together.
_MOST_RANKS, _MOST_TOKENS = 2**10, 2**31  # Of an engine, and of its context or vocabulary.

CallFault = Literal["unreachable", "disconnected", "timeout", "refused", "malformed"]


class EngineError(Exception):
    """A call of one engine failed. The reason is one printable line, whatever the server wrote."""

    fault: ClassVar[CallFault] = "malformed"

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = one_line(reason)
        super().__init__(f"{url}: {self.reason}")


class EngineUnreachable(EngineError):
    """No connection: nothing was sent."""

    fault = "unreachable"


class EngineDisconnected(EngineError):
    """The connection broke before the answer was complete."""

    fault = "disconnected"


class EngineTimeout(EngineError):
    """The answer was not complete in time."""

    fault = "timeout"


class EngineRefused(EngineError):
    """The engine answered with an error."""

    fault = "refused"

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(url, f"HTTP {status}: {message}")
        self.status = status


class EngineGarbled(EngineError):
    """The answer is not HTTP, not JSON, or lacks fields that every server has."""


def is_no_engine(error: BaseException) -> bool:
    """Whether the error shows that no SGLang server is there: a redirect, a missing page, an answer that is not JSON.

    Servers that are starting or busy, and proxies before them, give other errors.
    """
    if isinstance(error, EngineRefused):
        return HTTPStatus.MULTIPLE_CHOICES <= error.status < HTTPStatus.INTERNAL_SERVER_ERROR and error.status not in (
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.TOO_EARLY,
            HTTPStatus.TOO_MANY_REQUESTS,
        )
    return isinstance(error, EngineGarbled)


def one_line(text: str, limit: int = 400) -> str:
    """The text as one printable line of limited length, without markup."""
    head = text[: 10 * limit]
    if page := re.search(r"<(!doctype|html|head|body|\?xml)\b", head, re.IGNORECASE):
        head = head[: page.start()] + _PAGE
    line = "".join(c if c.isprintable() else " " for c in head)
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


@dataclass(frozen=True)
class EngineInfo:
    """What a server says about itself.

    `context_length` limits prompt and response together, in tokens. `process` changes when the server restarts; empty
    if unknown. `supports_sessions`: the server has /begin_weight_update. `plugin_protocol` is the version of its
    `dapo_mega.sglang_plugin`, None without the plugin; `has_plugin`: that version is this trainer's. `model` is the
    model's configuration, if the server reports one. `deterministic`: it samples by the seeds of requests.
    `adapter_rank` is the largest of LoRA adapters that it takes, 0 for none. `returns_routes`: it says which experts
    tokens went through, if it is asked. `knows_text`: it has the tokenizer.
    """

    url: str
    version: str
    process: str
    tp_size: int
    dtype: str
    quantization: str | None
    context_length: int | None
    vocab_size: int | None
    weight_version: str
    supports_sessions: bool
    disable_radix_cache: bool
    has_plugin: bool = False
    model: Mapping[str, Any] | None = None
    plugin_protocol: str | None = None
    deterministic: bool = False
    adapter_rank: int = 0
    returns_routes: bool = False
    knows_text: bool = False


class EngineClient:
    """One engine, on one event loop. Every method raises EngineError when its call fails."""

    def __init__(self, url: str, api_key: str, timeout_s: float = 600.0) -> None:
        """`timeout_s` limits the calls that update weights or move memory."""
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}", "Accept-Encoding": "identity"}
        self._timeout_s = timeout_s
        self._caller: Caller | None = None

    async def info(self) -> EngineInfo:
        """The server's settings and the version of its weights."""
        server = await self._json("GET", "/server_info")
        model = await self._json("GET", "/model_info")
        try:
            return _engine_info(self.url, server, model, await self._has("/begin_weight_update"))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise EngineGarbled(self.url, f"/server_info and /model_info are not SGLang's: {error!r}") from error

    async def weight_version(self) -> str:
        """The name of the engine's weights, as the last update set it; empty if it reports none."""
        model = await self._json("GET", "/model_info")
        return one_line(str(model.get("weight_version", ""))) if isinstance(model, dict) else ""

    async def probe(self, timeout_s: float) -> None:
        """Return once the engine has generated a token, which takes at least a second."""
        await self._request("GET", "/health", timeout_s=timeout_s)

    async def generate(self, payload: dict[str, Any], timeout_s: float, bytes_besides: int = 0) -> Any:
        """The parsed answer of /generate, whose size the number of tokens asked for limits, but for `bytes_besides`."""
        num_tokens = payload.get("sampling_params", {}).get("max_new_tokens", 0)
        if "logprob_start_len" in payload:
            num_tokens += len(payload["input_ids"])
        body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
        limit_bytes = _ANSWER_BYTES + num_tokens * _TOKEN_BYTES + bytes_besides
        content = await self._request("POST", "/generate", body, timeout_s, limit_bytes)
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:  # Python's parser takes NaN, too, whose place in the answer says more.
            return self._parsed("/generate", content)

    async def abort(self, rid: str | None = None, all: bool = False) -> None:
        """Abort the /generate calls whose `rid` starts with this one, or all."""
        await self._request("POST", "/abort_request", {"rid": rid or "", "abort_all": all})

    async def pause(self, mode: str) -> None:
        """Stop generating. Mode `abort` ends all calls, `retract` and `in_place` leave them waiting."""
        await self._request("POST", "/pause_generation", {"mode": mode}, self._timeout_s)

    async def resume(self, timeout_s: float = _SHORT_TIMEOUT_S) -> None:
        await self._request("POST", "/continue_generation", {}, timeout_s)

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Drop the cached keys and values of all prefixes; fails if requests still run after `wait_s`."""
        await self._request("POST", f"/flush_cache?timeout={wait_s:g}", {})

    async def command(self, call: str, timeout_s: float | None = None, **fields: Any) -> None:
        """Make one of SGLang's calls about weights, such as `end_weight_update`, with these fields of its body.
        `timeout_s` replaces the client's limit."""
        content = await self._request("POST", f"/{call}", fields, timeout_s or self._timeout_s)
        answer = self._parsed(f"/{call}", content)
        if isinstance(answer, dict) and answer.get("success") is False:
            reason = answer.get("message") or answer.get("error_message")
            raise EngineRefused(self.url, HTTPStatus.OK, f"/{call}: {reason}")

    async def add_adapter(self, name: str, config: Mapping[str, Any], tp_size: int) -> None:
        """Make an adapter of peft's `config` known, in place of an earlier one, before an update brings its values."""
        with contextlib.suppress(EngineRefused):  # A restarted server does not have it.
            await self.command("unload_lora_adapter", lora_name=name)
        tensors = [base64.b64encode(pickle.dumps({})).decode()] * tp_size
        await self.command(
            "load_lora_adapter_from_tensors", lora_name=name, config_dict=config, serialized_named_tensors=tensors
        )

    async def release_memory(self) -> None:
        """Free all memory; the engine must be idle."""
        await self._request("POST", "/release_memory_occupation", {}, self._timeout_s)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate again `tags` (weights, kv_cache, cuda_graph) of what `release_memory` freed; a server that has freed
        nothing dies."""
        await self._request("POST", "/resume_memory_occupation", {"tags": list(tags)}, self._timeout_s)

    async def close(self) -> None:
        if self._caller:
            await self._caller.close()

    async def _has(self, path: str) -> bool:
        """Whether the server has this POST call; does not make it."""
        try:
            await self._request("GET", path)
        except EngineRefused as error:
            return error.status == HTTPStatus.METHOD_NOT_ALLOWED
        return False

    async def _json(self, method: str, path: str) -> Any:
        return self._parsed(path, await self._request(method, path))

    def _parsed(self, path: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise EngineGarbled(self.url, f"the answer to {path} is not JSON: {_quote(content)}") from None

    @contextlib.contextmanager
    def _errors_of(self, path: str, timeout_s: float) -> Iterator[None]:
        """Turn what aiohttp raises into EngineError."""
        try:
            yield
        except (aiohttp.InvalidURL, UnicodeError) as error:
            raise EngineGarbled(self.url, f"invalid host name: {error}") from error
        except aiohttp.ClientSSLError as error:
            raise EngineGarbled(self.url, f"no TLS connection for {path}: {error}") from error
        except HttpProcessingError as error:
            raise EngineGarbled(
                self.url, f"the answer to {path} is not HTTP (is it https?): {error.message}"
            ) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnreachable(self.url, f"no connection for {path}: {error}") from error
        except TimeoutError as error:
            raise EngineTimeout(self.url, f"{path} was not answered within {timeout_s:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDisconnected(self.url, f"the connection broke during {path}: {error!r}") from error
        except (ValueError, LookupError, ArithmeticError) as error:
            raise EngineGarbled(self.url, f"{path} cannot be called: {error!r}") from error

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        timeout_s: float = _SHORT_TIMEOUT_S,
        limit_bytes: int = _ANSWER_BYTES,
    ) -> bytes:
        async def read(message: RawResponseMessage, content: aiohttp.StreamReader) -> bytes:
            if message.code >= HTTPStatus.MULTIPLE_CHOICES:
                raise EngineRefused(self.url, message.code, f"{path}: {await _excerpt(message, content)}")
            # Asked for as it is: a few packed bytes may be gigabytes.
            if message.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise EngineGarbled(self.url, f"the answer to {path} is packed, which was not asked for")
            found = bytearray()
            while piece := await content.readany():
                found += piece
                if len(found) > limit_bytes:
                    raise EngineGarbled(self.url, f"the answer to {path} has more than {limit_bytes:,} bytes")
            return bytes(found)

        with self._errors_of(path, timeout_s):
            if isinstance(body, dict):
                body = json.dumps(body).encode()
            if self._caller is None:
                # No limit of connections: the dispatcher limits requests, and an abort must not queue behind them.
                self._caller = Caller(self.url, self._headers, _CONNECT_TIMEOUT_S)
            async with asyncio.timeout(timeout_s):
                return await self._caller.call(method, path, body, read)


async def _excerpt(message: RawResponseMessage, content: aiohttp.StreamReader) -> str:
    """The start of the answer, or the target of a redirect."""
    if message.code < HTTPStatus.BAD_REQUEST:
        return f"redirects to {message.headers.get('Location', 'nowhere')}"
    start = b""
    async for piece in content.iter_any():
        start += piece
        if len(start) >= _EXCERPT_BYTES:
            break
    return _quote(start)


def _quote(content: bytes) -> str:
    start = content[:_EXCERPT_BYTES].strip()
    return _PAGE if start.startswith(b"<") else one_line(start.decode(errors="replace"), 150)


def _count(number: Any, most: int) -> int:
    """The number, if it is from 1 to `most`. Raises ValueError."""
    if type(number) is not int or not 0 < number <= most:
        raise ValueError(f"{one_line(str(number), 40)} is not a whole number from 1 to {most}")
    return number


def _engine_info(url: str, server: dict[str, Any], model: dict[str, Any], supports_sessions: bool) -> EngineInfo:
    context_length = server.get("context_length")
    if context_length is None and server.get("max_req_input_len"):
        context_length = server["max_req_input_len"] + _RESERVED_POSITIONS
    startup = server.get("startup_time")
    vocab_size, quantization = server.get("vocab_size"), server.get("quantization")
    protocols = [state.get(PROTOCOL_FIELD) for state in server.get("internal_states", [])]
    return EngineInfo(
        url=url,
        version=one_line(str(server.get("version", "unknown")), 40),
        process=hashlib.blake2b(json.dumps(startup).encode(), digest_size=8).hexdigest() if startup else "",
        tp_size=_count(server["tp_size"], _MOST_RANKS),
        dtype=one_line(str(server["dtype"]), 40),
        quantization=None if quantization is None else one_line(str(quantization), 40),
        context_length=None if context_length is None else _count(context_length, _MOST_TOKENS),
        vocab_size=None if vocab_size is None else _count(vocab_size, _MOST_TOKENS),
        weight_version=one_line(str(model.get("weight_version", server.get("weight_version", "")))),
        supports_sessions=supports_sessions,
        disable_radix_cache=bool(server.get("disable_radix_cache", False)),
        has_plugin=PROTOCOL in protocols,
        plugin_protocol=next((one_line(str(protocol), 40) for protocol in protocols if protocol is not None), None),
        model=described_model(server.get("internal_states", [])),
        deterministic=bool(server.get("enable_deterministic_inference", False)),
        adapter_rank=_count(server["max_lora_rank"], _MOST_RANKS) if server.get("enable_lora") else 0,
        returns_routes=bool(server.get("enable_return_routed_experts", False)),
        knows_text=not server.get("skip_tokenizer_init", True),
    )
