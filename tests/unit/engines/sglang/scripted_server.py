"""A dispatcher over scripted engines, all on one event loop, and what their answers must be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from dapo_mega.engines.protocol import Generation
from dapo_mega.engines.sglang.dispatcher import Dispatcher
from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.types import Answer, GenerationFailure, GenerationRequest, Response, SamplingParams
from tools.scripted_engine import ScriptedEngine, logprob_of, next_token

KEY = "secret"
VOCAB_SIZE = 1000
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DEADLINE_S = 120.0
"""For everything that is waited for; only what is wrong takes as long, on a busy machine too."""
SLOW = 5.0
"""Tokens per second: nothing long ends at this pace before `hurry`."""

_ids = itertools.count()


def within_deadline(test: Callable[[], Awaitable[None]]) -> None:
    """Run an asynchronous test body."""

    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(limited())


def make_request(
    prompt: Iterable[int] = (5, 6, 7), max_new_tokens: int = 8, stop_token_ids: tuple[int, ...] = ()
) -> GenerationRequest:
    request_id = next(_ids)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)
    return GenerationRequest(request_id, np.array(list(prompt), np.int32), (3 << 64) | request_id, sampling)


def expected_tokens(request: GenerationRequest, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """What the scripted model says, from start to end."""
    context = request.prompt_token_ids.tolist()
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_new_tokens:
        tokens.append(next_token(context + tokens, vocab_size))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens


def assert_exact(answer: Answer, request: GenerationRequest, vocab_size: int = VOCAB_SIZE) -> None:
    """The answer is the scripted model's, token by token."""
    assert isinstance(answer, Response), answer
    assert answer.request_id == request.request_id
    assert answer.token_ids.dtype == np.int32
    assert answer.logprobs.dtype == np.float32
    assert answer.token_ids.tolist() == expected_tokens(request, vocab_size)
    assert answer.logprobs.tolist() == [logprob_of(token) for token in answer.token_ids.tolist()]


def serve_model(engine: ScriptedEngine, folder: Path) -> None:
    """Make the engine score prompts as the checkpoint in `folder` does. What it says stays scripted."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.inference_mode()
    def score(ids: list[int]) -> list[float]:
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs[range(len(ids) - 1), ids[1:]].tolist()

    engine.vocab_size, engine.score = model.config.vocab_size, score


async def serve(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], state: Mapping[web.AppKey[Any], Any] | None = None
) -> tuple[web.AppRunner, str]:
    """A server with one handler for everything, which finds `state` in its app; returns its runner and URL."""
    app = web.Application()
    for key, value in (state or {}).items():
        app[key] = value
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@asynccontextmanager
async def serving(*engines: ScriptedEngine) -> AsyncIterator[list[EngineClient]]:
    """Clients of the engines while these listen."""
    async with AsyncExitStack() as stack:
        clients = []
        for engine in engines:
            url = await engine.start()
            stack.push_async_callback(engine.stop)
            clients.append(EngineClient(url, engine.api_key))
            stack.push_async_callback(clients[-1].close)
        yield clients


def answer_of(generation: Generation) -> Answer | None:
    """The answer of a generation that has ended; None if it was cancelled."""
    if generation.cancelled():
        return None
    failure = generation.exception()
    return failure if isinstance(failure, GenerationFailure) else generation.result()


@dataclass
class Fleet:
    """What a test holds of a dispatcher, and all that it asked, by request id."""

    dispatcher: Dispatcher
    clients: list[EngineClient]
    asked: dict[int, Generation] = field(default_factory=dict)

    async def ask(self, *requests: GenerationRequest) -> list[Answer]:
        """Start the requests and wait; answers in their order."""
        self.start(requests)
        return await self.answers(requests)

    def start(self, requests: Iterable[GenerationRequest]) -> None:
        self.asked |= {request.request_id: self.dispatcher.generate(request) for request in requests}

    async def answers(self, requests: Iterable[GenerationRequest]) -> list[Answer]:
        generations = [self.asked[request.request_id] for request in requests]
        await asyncio.wait(generations)
        found = [answer_of(generation) for generation in generations]
        assert None not in found, "cancelled"
        return [answer for answer in found if answer]

    def answered(self) -> set[int]:
        """The ids of the requests that have answers."""
        return {number for number, generation in self.asked.items() if generation.done() and answer_of(generation)}


@asynccontextmanager
async def fleet_of(*engines: ScriptedEngine, version: int = 0, **options: Any) -> AsyncIterator[Fleet]:
    """A dispatcher that uses all engines, which hold weights of this version."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "requests_per_engine": 64,
        "request_timeout_s": DEADLINE_S,
        "max_attempts": 3,
        "backoff_s": 0.02,
        **options,
    }
    async with serving(*engines) as clients:
        dispatcher = Dispatcher(**settings)
        for engine, client in zip(engines, clients, strict=True):
            engine.version = str(version)
            dispatcher.add_engine(client, version)
        try:
            yield Fleet(dispatcher, clients)
        finally:
            await dispatcher.close()
        check_counts(dispatcher)


def check_counts(dispatcher: Dispatcher) -> None:
    """Every submitted request was answered, failed or cancelled, or is open."""
    counts = dispatcher.counts
    ended = sum(counts[f"requests_{end}"] for end in ("answered", "failed", "cancelled"))
    assert counts["requests_submitted"] == ended + len(dispatcher.open)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens on this loop."""
    while not condition():
        await asyncio.sleep(0.005)


def hurry(engines: Iterable[ScriptedEngine]) -> None:
    """Let them generate the rest at once."""
    for engine in engines:
        engine.tokens_per_s = 1e6


class Servers:
    """Scripted engines on a loop of their own, for callers that are not asynchronous."""

    def __init__(self, count: int, tokens_per_s: float = 0.0) -> None:
        self.thread = LoopThread("scripted-engines")
        self.engines = [ScriptedEngine(VOCAB_SIZE, tokens_per_s, KEY) for _ in range(count)]
        self.urls = [self.thread.run(engine.start(), DEADLINE_S) for engine in self.engines]

    def stop(self, index: int) -> None:
        self.thread.run(self.engines[index].stop(), DEADLINE_S)

    def start_again(self, index: int) -> None:
        self.engines[index].process = "second"
        self.engines[index].version = "default"
        self.thread.run(self.engines[index].start(int(self.urls[index].rsplit(":", 1)[1])), DEADLINE_S)

    def close(self) -> None:
        self.thread.close()
