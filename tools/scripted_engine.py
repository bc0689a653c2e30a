"""A stand-in for an SGLang server that generates by rule, at a set pace, with the faults it is told to have.

python tools/scripted_engine.py --port 30100 --tokens-per-s 1000

It speaks what the trainer says to SGLang (/generate, /health, abort, pause, weight updates without weights). Each token
follows from the ones before it, so an answer that was ended early and goes on elsewhere can be checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from dapo_mega.engines.sglang.versions import WeightVersion

Fault = Literal[
    "malformed_json",
    "not_an_object",
    "token_missing",
    "wrong_count",
    "no_logprobs",
    "infinite_logprob",
    "null_logprob",
    "positive_logprob",
    "other_logprobs",
    "error_500",
    "reset",
    "drip",
    "old_version",
    "future_version",
    "foreign_version",
    "out_of_vocabulary",
    "too_long",
    "too_short",
    "hang",
    "abort",
]

_DRIP_S = 0.05
_TICK_S = 0.005


def next_token(context: Sequence[int], vocab_size: int) -> int:
    """What the scripted model says after `context`."""
    return (31 * context[-1] + 7 * len(context) + 3) % vocab_size


def logprob_of(token: int) -> float:
    """The scripted model's log-prob of a token, exact in float32."""
    return -(1 + token % 64) / 64


@dataclass
class Generation:
    """One call of /generate; `spans` are (version, end)."""

    context: list[int]
    limit: int
    stop_token_ids: frozenset[int]
    output: list[int] = field(default_factory=list)
    aborted_at: int | None = None
    spans: list[tuple[str, int]] = field(default_factory=list)

    def finish(self) -> str:
        if self.output and self.output[-1] in self.stop_token_ids:
            return "stop"
        if len(self.output) >= self.limit:
            return "length"
        return "" if self.aborted_at is None or len(self.output) < self.aborted_at else "abort"


class ScriptedEngine:
    """One server. Attributes may be changed while it runs."""

    def __init__(self, vocab_size: int = 1000, tokens_per_s: float = 0.0, api_key: str = "secret") -> None:
        """`tokens_per_s` is the pace of each call; 0 answers at once. No call begins while `keeps_calls_waiting`, and
        with `release_at` set nothing is answered before that many calls are in flight together."""
        self.vocab_size = vocab_size
        self.tokens_per_s = tokens_per_s
        self.api_key = api_key
        self.version = "default"
        self.process = "first"
        self.settings: dict[str, Any] = {}
        self.health: Literal["ok", "loading", "silent", "reset", "not_found"] = "ok"
        self.health_delay_s = 0.0
        self.fault: Callable[[dict[str, Any]], Fault | None] = lambda payload: None
        # Log-probs of all tokens but the first.
        self.score: Callable[[list[int]], list[float]] = lambda ids: [logprob_of(token) for token in ids[1:]]
        self.payloads: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.most_in_flight = 0
        self.url = ""
        self.keeps_calls_waiting = False
        self.release_at = 0
        self._released = asyncio.Event()
        self._is_paused = False
        self._generations: dict[str, Generation] = {}
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket | None = None

    async def start(self, port: int = 0) -> str:
        """Listen on 127.0.0.1; returns the URL."""
        app = web.Application(middlewares=[self._check_key], client_max_size=2**30)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._flush_cache),
                web.post("/update_weights_from_distributed", self._update_weights),
                web.post("/update_weights_from_disk", self._update_weights),
                web.post("/update_weights_from_tensor", self._update_weights),
                web.post("/update_weight_version", self._name_weights),
            ]
        )
        for path in (
            "/begin_weight_update",
            "/end_weight_update",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ):
            app.router.add_post(path, self._agree)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", port))
        await web.SockSite(self._runner, self._listener, backlog=16384).start()
        address = self._runner.addresses[0]
        self.url = f"http://127.0.0.1:{address[1]}"
        return self.url

    async def stop(self) -> None:
        """Close the port and break all connections; nothing happens the second time."""
        if self._runner and self._listener:
            # What is being accepted at this moment becomes a connection that the runner knows, and breaks.
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener = None
            await asyncio.sleep(_TICK_S)
            await self._runner.cleanup()

    @property
    def in_flight(self) -> int:
        return len(self._generations)

    @property
    def all_have_tokens(self) -> bool:
        """Whether every call in flight has its first token."""
        return all(generation.output for generation in list(self._generations.values()))

    @web.middleware
    async def _check_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.calls[request.path] += 1
        is_open = request.path.startswith("/health")  # As SGLang's is.
        if not is_open and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        if self.health == "silent":
            await asyncio.sleep(3600)
        while self._is_paused:
            await asyncio.sleep(_TICK_S)
        if self.health == "reset":
            _break_connection(request)
        await asyncio.sleep(self.health_delay_s)
        return web.Response(status={"loading": 503, "not_found": 404}.get(self.health, 200))

    async def _server_info(self, request: web.Request) -> web.Response:
        info = {
            "tp_size": 1,
            "dtype": "float32",
            "context_length": None,
            "max_req_input_len": 32768 - 6,
            "quantization": None,
            "disable_radix_cache": False,
            "version": "0.5.23",
            "startup_time": {"process": self.process},
            **self.settings,
        }
        return web.json_response(info)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._end_early(lambda rid: body["abort_all"] or (body["rid"] and rid.startswith(body["rid"])))
        return web.Response()

    def _end_early(self, is_meant: Callable[[str], object]) -> None:
        for rid, generation in self._generations.items():
            if is_meant(rid):
                generation.aborted_at = 0

    async def _pause(self, request: web.Request) -> web.Response:
        self._is_paused = True
        if (await request.json())["mode"] == "abort":
            self._end_early(lambda rid: True)
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self._is_paused = False
        return web.json_response({"status": "ok"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        return web.Response(status=400 if self._generations else 200, text="flushed or busy")

    async def _update_weights(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"] or self.version
        return web.json_response({"success": True, "message": ""})

    async def _name_weights(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "message": ""})

    async def _agree(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": ""})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        while self.keeps_calls_waiting:
            await asyncio.sleep(_TICK_S)
        self.payloads.append(payload)
        if isinstance(payload["input_ids"][0], list):
            answers = [await self._answer({**payload, "input_ids": ids}) for ids in payload["input_ids"]]
            return web.json_response(answers)
        fault = self.fault(payload)
        if fault == "error_500":
            return web.Response(status=500, text="Internal Server Error")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "reset":
            _break_connection(request)
        answer = _spoilt(await self._answer(payload, ends_early=fault == "abort"), fault, self.vocab_size)
        text = json.dumps(answer)
        if fault == "malformed_json":
            text = text[: len(text) // 2]
        if fault == "drip":
            return await _drip(request, text)
        return web.Response(text=text, content_type="application/json")

    async def _answer(self, payload: dict[str, Any], ends_early: bool = False) -> dict[str, Any]:
        parameters = payload["sampling_params"]
        generation = Generation(
            list(payload["input_ids"]),
            parameters["max_new_tokens"],
            frozenset(parameters.get("stop_token_ids", ())),
            aborted_at=parameters["max_new_tokens"] // 2 if ends_early else None,
        )
        rid = payload.get("rid", str(id(generation)))
        self._generations[rid] = generation
        self.most_in_flight = max(self.most_in_flight, len(self._generations))
        try:
            if self.in_flight >= self.release_at:
                self._released.set()
            await self._released.wait()
            await self._run(generation)
        finally:
            del self._generations[rid]
        answer = _answer(rid, generation, self.version)
        if "logprob_start_len" in payload:
            ids = payload["input_ids"]
            scores = [None, *self.score(ids)]
            answer["meta_info"]["input_token_logprobs"] = [[*pair, None] for pair in zip(scores, ids, strict=True)]
        return answer

    async def _run(self, generation: Generation) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0 if self.tokens_per_s else math.inf
        last = loop.time()
        while not generation.finish():
            if due >= 1 and not self._is_paused:
                self._add_token(generation)
                due -= 1
                continue
            await asyncio.sleep(_TICK_S)
            now = loop.time()
            due += 0.0 if self._is_paused else (now - last) * self.tokens_per_s
            last = now

    def _add_token(self, generation: Generation) -> None:
        token = next_token(generation.context, self.vocab_size)
        generation.context.append(token)
        generation.output.append(token)
        if generation.spans and generation.spans[-1][0] == self.version:
            generation.spans.pop()
        generation.spans.append((self.version, len(generation.output)))


def _answer(rid: str, generation: Generation, version: str) -> dict[str, Any]:
    """What a server says that has everything right."""
    starts = [0, *(end for _, end in generation.spans)]
    return {
        "text": "",
        "output_ids": generation.output,
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": generation.finish()},
            "completion_tokens": len(generation.output),
            "weight_version": version,
            "weight_versions": [
                {"version": v, "start": start, "end": end}
                for (v, end), start in zip(generation.spans, starts, strict=False)
            ],
            "output_token_logprobs": [[logprob_of(token), token, None] for token in generation.output],
        },
    }


def _spoilt(answer: dict[str, Any], fault: Fault | None, vocab_size: int) -> Any:
    ids, meta = answer["output_ids"], answer["meta_info"]
    triples, spans = meta["output_token_logprobs"], meta.get("weight_versions", [])
    version = WeightVersion.parse(meta["weight_version"]) or WeightVersion("", 0)
    match fault:
        case "not_an_object":
            return [answer]
        case "token_missing":
            ids.pop()
        case "wrong_count":
            meta["completion_tokens"] += 1
        case "no_logprobs":
            del meta["output_token_logprobs"]
        case "infinite_logprob":
            triples[-1][0] = float("-inf")
        case "null_logprob":
            triples[-1][0] = None
        case "positive_logprob":
            triples[0][0] = 0.01
        case "other_logprobs":
            triples[0][1] += 1
        case "old_version":
            spans[0]["version"] = str(WeightVersion(version.run, version.step - 1))
        case "future_version":
            spans[-1]["version"] = str(WeightVersion(version.run, version.step + 1))
        case "foreign_version":
            spans[-1]["version"] = "default"
        case "out_of_vocabulary":
            ids[-1] = triples[-1][1] = vocab_size
        case "too_long":
            _resize(answer, [*ids, ids[-1]], [*triples, triples[-1]])
        case "too_short":
            _resize(answer, ids[:-1], triples[:-1])
    return answer


def _resize(answer: dict[str, Any], ids: list[int], triples: list[Any]) -> None:
    answer["output_ids"] = ids
    answer["meta_info"].update(output_token_logprobs=triples, completion_tokens=len(ids))
    answer["meta_info"]["weight_versions"][-1]["end"] = len(ids)


def _break_connection(request: web.Request) -> None:
    assert request.transport
    request.transport.abort()


async def _drip(request: web.Request, text: str) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for character in text:
        await response.write(character.encode())
        await asyncio.sleep(_DRIP_S)
    return response


async def _serve(options: argparse.Namespace) -> None:
    engines = [
        ScriptedEngine(options.vocab_size, options.tokens_per_s, options.api_key) for _ in range(options.engines)
    ]
    for i, engine in enumerate(engines):
        engine.version = "0"
        engine.release_at = options.release_at
        print(await engine.start(options.port + i if options.port else 0), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await asyncio.gather(*(engine.stop() for engine in engines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="of the first; 0 takes free ones. URLs are printed")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="of each call; 0 answers at once")
    parser.add_argument("--release-at", type=int, default=0, help="calls in flight before any is answered")
    parser.add_argument("--api-key", default="secret")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
