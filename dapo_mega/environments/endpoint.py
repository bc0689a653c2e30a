"""An endpoint like OpenAI's and vLLM's before the policy, in a thread of its own, for programs that ask it.

Sessions are found by their path or by their key. What a request says of sampling is ignored but for a smaller
max_tokens, as the run's sampling wins; the header x-dapo-mega-ignored names it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from aiohttp import web

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.data.tokenizer import Decode
from dapo_mega.environments.dialogues import Dialogue
from dapo_mega.environments.observations import read_observation, read_tools
from dapo_mega.environments.sessions import Message, Recorded, RefusedError, Session, compared
from dapo_mega.errors import InputError

logger = logging.getLogger(__name__)

IGNORED_HEADER: Final = "x-dapo-mega-ignored"
_IGNORED: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "user", "metadata", "store", "parallel_tool_calls", "reasoning_effort", "verbosity", "service_tier",
    "safety_identifier", "prompt_cache_key", "skip_special_tokens", "stop_token_ids", "logprobs", "top_logprobs",
    "ignore_eos", "request_id", "cache_salt", "priority", "routed_experts_prompt_start",
)  # fmt: skip
_CHAT: Final = ("model", "messages", "tools", "tool_choice", "stream", "stream_options", "n", "max_tokens",
                "max_completion_tokens")  # fmt: skip
_GENERATE: Final = ("model", "token_ids", "sampling_params", "stream")
_SAMPLING: Final = ("n", "max_tokens")
_ROLES: Final = {"user": "user", "tool": "tool", "system": "system", "developer": "system", "assistant": "assistant"}
_NOTHING: Final[tuple[Any, ...]] = (None, False, [], {}, {"type": "text"})
"""Values of a parameter that ask for nothing."""
_MAX_BODY_BYTES: Final = 2**26
_MOST_ANSWERS: Final = 64
_MOST_DIALOGUES: Final = 256
_PIECES: Final = re.compile(".{1,12}", re.DOTALL)
_START_LIMIT_S: Final = 30.0

Answer = dict[str, Any]


@dataclass
class _Answering:
    """A request that is answered, once. `request` is the one that waited for it last."""

    task: asyncio.Task[Answer]
    request: web.Request
    is_delivered: bool = False


@dataclass(frozen=True)
class Wording:
    """How prompts and turns are written: `dialogue` shows no tools; token ids are below `vocabulary`."""

    dialogue: Dialogue
    decode: Decode
    vocabulary: int


class Endpoint:
    """Listens while it is open, on `loop`, which runs in its thread. Raises InputError where it cannot."""

    def __init__(self, wording: Wording, host: str, port: int) -> None:
        self._wording = wording
        self._with_tools = lru_cache(_MOST_DIALOGUES)(lambda tools: wording.dialogue.with_tools(json.loads(tools)))
        self._sessions: dict[str, Session] = {}
        self._told_ignored = False
        self.loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        threading.Thread(target=self.loop.run_forever, name="endpoint", daemon=True).start()
        try:
            found = asyncio.run_coroutine_threadsafe(self._listen(host, port), self.loop).result(_START_LIMIT_S)
        except OSError as error:
            self.loop.call_soon_threadsafe(self.loop.stop)
            raise InputError(f"environment: no endpoint at host={host} port={port}: {error}") from error
        reached = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
        self.url = f"http://[{reached}]:{found}" if ":" in reached else f"http://{reached}:{found}"

    def add(self, session: Session) -> None:
        """Answer for a session from now on; to be called in the endpoint's thread, as `remove`."""
        self._sessions[session.id] = self._sessions[session.key] = session

    def remove(self, session: Session) -> None:
        for name in (session.id, session.key):
            self._sessions.pop(name, None)
        for answering in session.answers.values():
            answering.task.cancel()

    def close(self) -> None:
        """Stop listening. What is open fails."""
        if self._runner:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self.loop).result(_START_LIMIT_S)
        self._runner = None
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _listen(self, host: str, port: int) -> int:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_in_openais_form])
        for before in ("", "/sessions/{session}"):
            app.router.add_get(f"{before}/v1/models", self._models)
            app.router.add_post(f"{before}/v1/chat/completions", self._answered(self._chat))
            app.router.add_post(f"{before}/inference/v1/generate", self._answered(self._generate))
        app.router.add_post("/sessions/{session}/reward", self._reward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    def _session(self, request: web.Request) -> Session:
        """That of the path, with its key, or else that of the key."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = given or request.headers.get("X-Session-ID", "")
        session = self._sessions.get(request.match_info.get("session", key))
        if session is None or not hmac.compare_digest(session.key.encode(), key.encode(errors="replace")):
            why = "give the session's OPENAI_API_KEY as the bearer key; keys end with their program"
            raise RefusedError(f"there is no such session, or the key is another: {why}", status=401)
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        # Without a max_model_len: a client that knows it refuses what is too long itself: a failure.
        model = {"id": "policy", "object": "model", "owned_by": "dapo_mega", "created": 0}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), _body(await request.read())
        _check_keys(body, ("reward", "correct", "parts"))
        if body.get("reward") is None:
            raise RefusedError("reward is missing; give {'reward': number}", param="reward")
        session.earned = read_observation(body, "the program").earned
        return web.json_response({"ok": True})

    def _answered(
        self, work: Callable[[Session, Mapping[str, Any]], Awaitable[Answer]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler that gives one turn's answer to a request and to its retries: those that say so, and the same
        request behind one whose connection ended before it had its answer."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session, content = self._session(request), await request.read()
            body = _body(content)
            digest = hashlib.sha256(request.path.encode() + content).hexdigest()
            known = session.answers.get(digest)
            is_gone = known is not None and not known.is_delivered and _is_gone(known.request)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            if known is None or not (is_gone or is_retry):
                while len(session.answers) >= _MOST_ANSWERS:
                    del session.answers[next(iter(session.answers))]
                known = _Answering(asyncio.ensure_future(work(session, body)), request)
                session.answers.pop(digest, None)
                session.answers[digest] = known
            known.request = request
            try:
                answer = await asyncio.shield(known.task)
            except asyncio.CancelledError:
                if not known.task.cancelled():
                    raise
                raise RefusedError("the trajectory is over", status=503) from None
            response = await self._sent(request, body, answer)
            known.is_delivered = known.is_delivered or not _is_gone(request)
            return response

        return handle

    async def _sent(self, request: web.Request, body: Mapping[str, Any], answer: Answer) -> web.StreamResponse:
        given = {**body, **(body.get("sampling_params") or {})}
        headers = {}
        if ignored := [key for key in _IGNORED if given.get(key) is not None]:
            headers[IGNORED_HEADER] = ", ".join(ignored)
            if not self._told_ignored:
                self._told_ignored = True
                logger.info("environment: the run's sampling wins; a program's %s is ignored", headers[IGNORED_HEADER])
        streams = bool(body.get("stream"))
        of_stream = {**headers, "Content-Type": "text/event-stream"}
        response = web.StreamResponse(headers=of_stream) if streams else web.json_response(answer, headers=headers)
        await response.prepare(request)
        if streams:
            has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            for event in (*map(json.dumps, _chunks(answer, has_usage)), "[DONE]"):
                await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response

    async def _chat(self, session: Session, body: Mapping[str, Any]) -> Answer:
        _check_keys(body, _CHAT)
        _check_types(body, {"model": str, "stream": bool, "stream_options": dict, "messages": list, "tools": list})
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise RefusedError("tool_choice is 'auto' or 'none': the policy chooses", param="tool_choice")
        tools = read_tools(body.get("tools") or []) if body.get("tool_choice") != "none" else []
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.get("messages") or [])]
        if not messages or messages[-1]["role"] == "assistant":
            raise RefusedError("messages end with one that is not the policy's", param="messages")
        as_text = json.dumps(tools)
        try:
            dialogue = self._with_tools(as_text) if tools else self._wording.dialogue
        except InputError as error:
            raise RefusedError(str(error), param="tools") from None
        kind = f"{body.get('model')}\n{as_text}"
        limit = _max_tokens(body, "max_completion_tokens") or _max_tokens(body, "max_tokens")

        def note(turn: Recorded) -> Answer:
            message, finish_reason = self._said(turn, dialogue, session.num_turns)
            calls = message.get("tool_calls", [])
            turn.history = (kind, *map(compared, [*messages, _message(message, "the answer")]))
            turn.names = {call["id"]: call["function"]["name"] for call in calls}
            return _answer("chat.completion", body, {"message": message, "finish_reason": finish_reason}, turn)

        return await session.turn(lambda: session.behind_messages(kind, messages, dialogue), limit, note)

    async def _generate(self, session: Session, body: Mapping[str, Any]) -> Answer:
        _check_keys(body, _GENERATE)
        _check_types(body, {"model": str, "token_ids": list, "sampling_params": dict})
        sampling, ids = body.get("sampling_params") or {}, body.get("token_ids") or []
        _check_keys(sampling, _SAMPLING)
        if body.get("stream"):
            raise RefusedError("stream is not served here", param="stream")
        size = self._wording.vocabulary
        if not ids or not all(type(i) is int and 0 <= i < size for i in ids):
            raise RefusedError(f"token_ids is a list of ids from 0 to {size - 1}, not empty", param="token_ids")

        def note(turn: Recorded) -> Answer:
            values = zip(turn.sampled_ids, turn.response.logprobs.tolist(), strict=True)
            content = [
                {"token": f"token_id:{i}", "logprob": value, "bytes": None, "top_logprobs": []} for i, value in values
            ]
            choice = {"token_ids": turn.sampled_ids, "logprobs": {"content": content}}
            return _answer("generate", body, choice | {"finish_reason": turn.response.finish_reason}, turn)

        return await session.turn(lambda: session.behind_tokens(ids), _max_tokens(sampling, "max_tokens"), note)

    def _said(self, turn: Recorded, dialogue: Dialogue, number: int) -> tuple[dict[str, Any], str]:
        """The policy's turn as a message. One with a call that cannot be used, as it is no JSON, was cut off or there
        are no tools, is said as it was written."""
        read = dialogue.read(turn.prompt_ids, turn.sampled_ids)
        finish_reason: str = turn.response.finish_reason
        can_call = bool(dialogue.tools) and finish_reason != "length"
        if dialogue.tools:
            problems = sum(bool(call["problem"]) for call in read.calls)
            turn.rows.note({"tool_calls": len(read.calls), "tool_unreadable": problems})
        calls = [
            {
                "id": f"c{number % 10_000:04}{i:04}",  # Nine letters and digits, as Mistral's template demands.
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for i, call in enumerate(read.calls)
            if can_call and not call["problem"]
        ]
        if len(calls) < len(read.calls):
            (text,) = self._wording.decode([turn.rows.token_ids[turn.start : turn.end]])
            message: dict[str, Any] = {"role": "assistant", "content": text}
        else:
            message = {"role": "assistant", "content": read.text if read.text or not calls else None}
            if read.reasoning:
                message["reasoning_content"] = read.reasoning
        if calls:
            return {**message, "tool_calls": calls}, "tool_calls"
        return message, finish_reason


@web.middleware
async def _in_openais_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as error:
        refused = error
    except MisuseError as error:
        refused = RefusedError(str(error))
    except web.HTTPException as error:
        refused = RefusedError(f"{request.method} {request.path}: {error.reason}", status=error.status)
    except ConnectionError:
        return web.Response()  # To nobody.
    except Exception as error:
        logger.exception("environment: the endpoint could not answer %s", request.path)
        refused = RefusedError(f"{type(error).__name__}: {error}", status=500)
    return web.json_response(refused.body, status=refused.status, headers={"x-should-retry": "false"})


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _body(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()  # No half of a character.
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    return body


def _check_keys(given: Mapping[str, Any], served: tuple[str, ...]) -> None:
    for key, value in given.items():
        if key not in served and key not in _IGNORED and value not in _NOTHING:
            raise RefusedError(f"{key} is unknown or not served here", param=key, code="unknown_parameter")
    if given.get("n") not in (None, 1):
        raise RefusedError("n must be 1: ask several times", param="n")


def _check_types(body: Mapping[str, Any], types: Mapping[str, type]) -> None:
    for key, kind in types.items():
        if body.get(key) is not None and not isinstance(body[key], kind):
            raise RefusedError(f"{key} must be of type {kind.__name__}", param=key, code="invalid_type")


def _max_tokens(given: Mapping[str, Any], key: str) -> int | None:
    value = given.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise RefusedError(f"{key} must be a whole number, at least 1", param=key)
    return value


def _message(given: Any, where: str) -> Message:
    """A message as templates take it."""
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise RefusedError(f"{where} must have a role of {', '.join(_ROLES)}", param=where)
    content = given.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = texts if None in texts else "".join(map(str, texts))
    if not isinstance(content, str | None):
        raise RefusedError(f"{where}.content must be text", param=where)
    message: Message = {"role": _ROLES[role], "content": content or ""}
    if role == "tool":
        message |= {"tool_call_id": given.get("tool_call_id") or "", "name": given.get("name") or ""}
        if not isinstance(message["tool_call_id"], str) or not isinstance(message["name"], str):
            raise RefusedError(f"{where}: tool_call_id and name must be text", param=where)
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], where)
    return message


def _calls(given: Any, where: str) -> list[Any]:
    found = []
    for call in given if isinstance(given, list) else [None]:
        match call:
            case {"function": {"name": str(name), "arguments": str(arguments)}, **others}:
                pass
            case _:
                raise RefusedError(f"{where}.tool_calls must be [{{id, function: {{name, arguments}}}}]", param=where)
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = None
        written = {"name": name, "arguments": read if isinstance(read, dict) else arguments}
        found.append({"id": str(others.get("id") or ""), "type": "function", "function": written})
    return found


def _answer(kind: str, body: Mapping[str, Any], choice: dict[str, Any], turn: Recorded) -> Answer:
    num_sampled = turn.end - turn.start
    usage = {"prompt_tokens": turn.start, "completion_tokens": num_sampled, "total_tokens": turn.end}
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    choices = [{"index": 0, "logprobs": None, **choice}]
    return {**head, "model": body.get("model") or "", "choices": choices, "usage": usage}


def _chunks(answer: Answer, has_usage: bool) -> list[Answer]:
    """The answer in pieces, as it is streamed."""
    (choice,) = answer["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "content"):
        deltas += [{key: piece} for piece in _PIECES.findall(message.get(key) or "")]
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
        pieces = _PIECES.findall(function["arguments"])
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    return [*chunks, {**head, "choices": [], "usage": answer["usage"]}] if has_usage else chunks
