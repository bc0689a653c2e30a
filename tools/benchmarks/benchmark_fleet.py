"""Measures the client of a fleet: many requests in flight, and its speed against a server's own batch interface.

python tools/benchmark.py fleet --requests 10000 --engines 64 512
python tools/benchmark.py fleet --url http://127.0.0.1:30000 --vocab-size 200

Without --url scripted engines in a process of their own hold all answers back until every request is in flight; groups
of 16 are rolled out as training does. Then engines have all answers prepared, and the client's CPU time of a turn is
compared with that of the least that aiohttp and json can do for the same requests and answers. Then rank 0 of a trainer
updates the weights of the numbers of engines that --engines says, which answer its calls and receive nothing: what is
measured is the CPU time of its calls, not that of gathering and sending.

With --url the requests go through the dispatcher to an SGLang server, and in turn as one list in a single call, which
no client can be faster than. Start that server with --weight-version 0, and put its key into --api-key-env.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from benchmark_timing import Duration, median_cpu, median_wall, speed_ratio, take_turns
from update_calls import UpdateCost, measure_updates

from dapo_mega.engines.sglang.api import generate_payload
from dapo_mega.engines.sglang.dispatcher import Dispatcher
from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.engines.sglang.versions import WeightVersion
from dapo_mega.environments.base import SINGLE_TURN, Generate, Progress, SingleTurn
from dapo_mega.errors import InputError
from dapo_mega.rewards.bounded_http import raise_file_limit
from dapo_mega.rollout.groups import OpenGroup
from dapo_mega.types import GenerationFailure, GenerationRequest, Prompt, SamplingParams, Trajectory

_TIMEOUT_S = 600.0
_IDLE_LIMIT_S = 30.0  # A server clears up for a moment after its last answer.
_PROMPT_TOKENS = 16
_NUM_ENGINES = 20
_GROUP_SIZE = 16
_OTHER_FILES = 100
_KEY = "secret"
_TURN_SIZES = ((16, 32), (300, 300), (2000, 300))  # Tokens of prompt and answer.
_TURNS_PER_ENGINE = 16  # In flight.
_TURN_VOCABULARY = 150_000
_BUCKET_TENSORS = 6
_UPDATES = 3


@dataclass(frozen=True)
class Crowd:
    """Many requests in flight at once; memory in MB, `most_overtaken` in places between submission and answer.
    `again_s` is the CPU time of as many requests that follow at once and find the connections of the last ones."""

    num_requests: int
    most_in_flight: int
    peak_growth_mb: float
    cpu_s: float
    again_s: float
    wall_s: float
    most_overtaken: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10000, help="in flight at scripted engines, a multiple of 20")
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 512], help="whose weights are updated")
    parser.add_argument("--buckets", type=int, default=128, help="of an update, each of six tensors")
    parser.add_argument("--url", help="of an SGLang server to compare with its own batch interface")
    parser.add_argument("--api-key-env", default="DAPO_MEGA_API_KEY")
    parser.add_argument("--vocab-size", type=int, default=200, help="of the server's model")
    parser.add_argument("--batch", type=int, default=64, help="requests at once on the server")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=2000, help="in a round of each size, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    if options.url:
        lines = asyncio.run(_compare(options))
    else:
        gc.collect()
        gc.freeze()  # As a run does.
        lines = _report_crowd(asyncio.run(measure_crowd(options.requests)))
        lines += ["", *_report_turns(options.turns, options.rounds)]
        lines += ["", *_report_updates(measure_updates(options.engines, options.buckets, _BUCKET_TENSORS, _UPDATES))]
    print("\n".join(lines))


class _Noting(SingleTurn):
    """Notes the order in which the requests are answered."""

    def __init__(self) -> None:
        self.order: list[int] = []

    async def run(
        self, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        trajectory = await super().run(prompt, request, generate, progress)
        self.order.append(request.request_id)
        return trajectory


async def measure_crowd(num_requests: int) -> Crowd:
    """Two requests for every place, so that one half waits while the other is in flight; then the same again, answered
    as they come. Of places for which this
    process may not open enough files, those are left out."""
    per_engine = num_requests // _NUM_ENGINES
    most_per_engine = min(per_engine, (raise_file_limit() - _OTHER_FILES) // _NUM_ENGINES)
    # No answer before all of an engine's calls are in flight.
    scripted = str(Path(__file__).parents[1] / "scripted_engine.py")
    with _servers(scripted, "--api-key", _KEY, "--release-at", str(most_per_engine)) as urls:
        clients = [EngineClient(url, _KEY) for url in urls]
        environment = _Noting()
        dispatcher = Dispatcher(
            vocab_size=1000,
            requests_per_engine=per_engine,
            request_timeout_s=_TIMEOUT_S,
            max_attempts=1,
            most_calls=most_per_engine * _NUM_ENGINES,
        )
        requests = _requests(2 * num_requests, 1000, [32] * (2 * num_requests), _PROMPT_TOKENS)
        memory, cpu, wall = _peak_memory_mb(), time.process_time(), time.perf_counter()
        for client in clients:
            dispatcher.add_engine(client, 0)
        tasks = [asyncio.create_task(rollout) for rollout in _rollouts(requests, dispatcher, environment)]
        while not (in_flight := sum(engine.in_flight for engine in dispatcher.engines())):
            await asyncio.sleep(0)
        async with asyncio.timeout(_TIMEOUT_S):
            await _all_answered(tasks)
        growth, cpu, wall = _peak_memory_mb() - memory, time.process_time() - cpu, time.perf_counter() - wall
        again = time.process_time()
        async with asyncio.timeout(_TIMEOUT_S):
            await _all_answered(_rollouts(requests, dispatcher))
        assert dispatcher.counts["requests_answered"] == 4 * num_requests
        crowd = Crowd(
            num_requests=2 * num_requests,
            most_in_flight=in_flight,
            peak_growth_mb=growth,
            cpu_s=cpu,
            again_s=time.process_time() - again,
            wall_s=wall,
            most_overtaken=max(place - request_id for place, request_id in enumerate(environment.order)),
        )
        await dispatcher.close()
        await asyncio.gather(*(client.close() for client in clients))
    return crowd


def _group(requests: Sequence[GenerationRequest]) -> OpenGroup:
    return OpenGroup(Prompt(0, "", requests[0].prompt_token_ids, ""), tuple(requests))


def _rollouts(
    requests: Sequence[GenerationRequest], dispatcher: Dispatcher, environment: SingleTurn = SINGLE_TURN
) -> list[Coroutine[Any, Any, object]]:
    """In groups of 16, as training rolls them out."""
    groups = [_group(requests[i : i + _GROUP_SIZE]) for i in range(0, len(requests), _GROUP_SIZE)]
    return [group.roll_out(environment, dispatcher.generate) for group in groups]


async def _all_answered(awaited: Sequence[Awaitable[object]]) -> None:
    try:
        await asyncio.gather(*awaited)
    except GenerationFailure as failure:
        raise InputError(f"request {failure.request_id} failed: {failure.reason}") from None


@contextmanager
def _servers(program: str, *arguments: str) -> Iterator[list[str]]:
    """URLs of engines in a process of their own."""
    command = [sys.executable, program, "--engines", str(_NUM_ENGINES), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield [server.stdout.readline().strip() for _ in range(_NUM_ENGINES)]
        finally:
            server.terminate()


def _requests(count: int, vocab_size: int, lengths: Sequence[int], prompt_tokens: int) -> list[GenerationRequest]:
    """Random prompts; responses have exactly these lengths."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(4, vocab_size, (count, prompt_tokens), dtype=np.int32)
    return [
        GenerationRequest(i, prompts[i], i, SamplingParams(max_new_tokens=length)) for i, length in enumerate(lengths)
    ]


def _peak_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _report_crowd(crowd: Crowd) -> list[str]:
    return [
        "| requests | in flight | memory, MB | CPU per request, ms | again, ms | requests/s | most places overtaken |",
        "|---|---|---|---|---|---|---|",
        f"| {crowd.num_requests} | {crowd.most_in_flight} | {crowd.peak_growth_mb:.0f} | "
        f"{crowd.cpu_s / crowd.num_requests * 1e3:.2f} | {crowd.again_s / crowd.num_requests * 1e3:.2f} | "
        f"{crowd.num_requests / crowd.wall_s:.0f} | "
        f"{crowd.most_overtaken} |",
    ]


def _report_turns(num_turns: int, num_rounds: int) -> list[str]:
    lines = [
        "| tokens of prompt and answer | turns | CPU per turn, ms | aiohttp and json alone, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    with _servers(str(Path(__file__).with_name("prepared_engines.py"))) as urls:
        for prompt_tokens, new_tokens in _TURN_SIZES:
            count = num_turns + len(urls) * _TURNS_PER_ENGINE
            requests = _requests(count, _TURN_VOCABULARY, [new_tokens] * count, prompt_tokens)
            sides = {
                "client": lambda requests=requests: asyncio.run(_through_client(urls, requests)),
                "bare": lambda requests=requests: asyncio.run(_through_aiohttp(urls, requests)),
            }
            durations = take_turns(sides, num_rounds)
            client_ms, bare_ms = (median_cpu(durations[side]) / num_turns * 1e3 for side in ("client", "bare"))
            ratio = speed_ratio(durations["bare"], durations["client"]).cpu
            lines.append(
                f"| {prompt_tokens} + {new_tokens} | {num_turns} | {client_ms:.2f} | {bare_ms:.2f} | {ratio:.2f} |"
            )
    return lines


async def _through_client(urls: Sequence[str], requests: Sequence[GenerationRequest]) -> Duration:
    """As many turns as connections open these before the others are measured."""
    clients = [EngineClient(url, _KEY) for url in urls]
    dispatcher = Dispatcher(
        vocab_size=_TURN_VOCABULARY,
        requests_per_engine=_TURNS_PER_ENGINE,
        request_timeout_s=_TIMEOUT_S,
        max_attempts=1,
    )
    for client in clients:
        dispatcher.add_engine(client, 0)
    opening = len(urls) * _TURNS_PER_ENGINE
    await _all_answered(_rollouts(requests[:opening], dispatcher))
    wall, cpu = time.perf_counter(), time.process_time()
    await _all_answered(_rollouts(requests[opening:], dispatcher))
    duration = Duration(time.perf_counter() - wall, time.process_time() - cpu)
    await dispatcher.close()
    await asyncio.gather(*(client.close() for client in clients))
    return duration


async def _through_aiohttp(urls: Sequence[str], requests: Sequence[GenerationRequest]) -> Duration:
    """The same calls from as many loops as places, whose answers, in SGLang's own form, are parsed and thrown away."""
    payloads = [generate_payload(request, [], f"{request.request_id}.") for request in requests]
    bodies = [{**payload, "input_ids": payload["input_ids"].tolist()} for payload in payloads]
    for body in bodies:
        del body["sampling_params"]["custom_params"]

    async def place(url: str, waiting: Iterator[dict[str, Any]]) -> None:
        for payload in waiting:
            async with session.post(f"{url}/generate", json=payload) as response:
                json.loads(await response.read())

    headers = {"Authorization": f"Bearer {_KEY}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, raise_for_status=True) as session:
        places = [url for url in urls for _ in range(_TURNS_PER_ENGINE)]
        await asyncio.gather(*(place(url, iter([body])) for url, body in zip(places, bodies, strict=False)))
        wall, cpu = time.perf_counter(), time.process_time()
        waiting = iter(bodies[len(places) :])
        await asyncio.gather(*(place(url, waiting) for url in places))
        return Duration(time.perf_counter() - wall, time.process_time() - cpu)


def _report_updates(costs: Sequence[UpdateCost]) -> list[str]:
    lines = ["| engines updated | calls per engine | CPU, s | CPU per engine, ms | wall, s |", "|---|---|---|---|---|"]
    for cost in costs:
        lines.append(
            f"| {cost.num_engines} | {cost.calls_per_engine:.0f} | {cost.cpu_s:.3f} | "
            f"{cost.cpu_s / cost.num_engines * 1e3:.2f} | {cost.wall_s:.3f} |"
        )
    return lines


async def _compare(options: argparse.Namespace) -> list[str]:
    key = os.environ.get(options.api_key_env, "")
    client = EngineClient(options.url, key)
    info = await client.info()
    version = WeightVersion.parse(info.weight_version)
    await client.close()
    if version is None:
        raise InputError(f"the server's weight version is {info.weight_version!r}; start it with --weight-version 0")
    draw = np.random.default_rng(1)
    kinds = {
        "equal": [options.new_tokens] * options.batch,
        "mixed": draw.integers(options.new_tokens // 8, 2 * options.new_tokens, options.batch).tolist(),
    }
    lines = [
        f"{options.batch} requests of {_PROMPT_TOKENS} tokens; medians of {options.rounds} rounds in turn",
        "",
        "| lengths | tokens | dispatcher, tokens/s | batch, tokens/s | ratio |",
        "|---|---|---|---|---|",
    ]
    for kind, lengths in kinds.items():
        requests = _requests(options.batch, options.vocab_size, lengths, _PROMPT_TOKENS)
        sides = _sides(options, key, version, requests)
        durations = await asyncio.to_thread(take_turns, sides, options.rounds)
        tokens = sum(lengths)
        lines.append(
            f"| {kind} | {tokens} | {tokens / median_wall(durations['dispatcher']):.0f} | "
            f"{tokens / median_wall(durations['batch']):.0f} | "
            f"{speed_ratio(durations['dispatcher'], durations['batch']).wall:.3f} |"
        )
    return lines


def _sides(
    options: argparse.Namespace,
    key: str,
    version: WeightVersion,
    requests: Sequence[GenerationRequest],
) -> dict[str, Callable[[], Duration]]:
    async def through_dispatcher(client: EngineClient) -> None:
        dispatcher = Dispatcher(
            vocab_size=options.vocab_size,
            requests_per_engine=len(requests),
            request_timeout_s=_TIMEOUT_S,
            max_attempts=1,
            run=version.run,
        )
        dispatcher.add_engine(client, version.step)
        await _all_answered([dispatcher.generate(request) for request in requests])
        await dispatcher.close()

    async def as_one_batch(client: EngineClient) -> None:
        payloads = [generate_payload(request, [], "") for request in requests]
        batch: dict[str, Any] = {
            "input_ids": [payload["input_ids"] for payload in payloads],
            "sampling_params": [payload["sampling_params"] for payload in payloads],
            "return_logprob": True,
        }
        answers = await client.generate(batch, _TIMEOUT_S)
        assert len(answers) == len(requests)

    def side(generate: Callable[[EngineClient], Awaitable[None]]) -> Callable[[], Duration]:
        return lambda: asyncio.run(_timed(options.url, key, generate))

    return {"dispatcher": side(through_dispatcher), "batch": side(as_one_batch)}


async def _timed(url: str, key: str, generate: Callable[[EngineClient], Awaitable[None]]) -> Duration:
    """One round, on an idle server without cached prefixes."""
    client = EngineClient(url, key)
    await client.flush_cache(_IDLE_LIMIT_S)
    wall, cpu = time.perf_counter(), time.process_time()
    await generate(client)
    duration = Duration(time.perf_counter() - wall, time.process_time() - cpu)
    await client.close()
    return duration


if __name__ == "__main__":
    main()
