"""What the endpoint for programs adds to a turn of the policy: latency of a call, and CPU of its thread.

python tools/benchmark.py endpoint

One client asks in one connection, as a program does, in conversations that grow by a turn of the policy and a
message of the user; the policy answers at once. CPU is of the endpoint's thread alone.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from dapo_mega.cli import run_command
from dapo_mega.config.environment import ProgramEnvironment
from dapo_mega.data.tokenizer import build_byte_tokenizer, decoder
from dapo_mega.environments.dialogues import TemplateDialogue
from dapo_mega.environments.endpoint import Endpoint, Wording
from dapo_mega.environments.sessions import Ask, Session
from dapo_mega.types import GenerationRequest, Response, SamplingParams

_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


async def _answer(session: Session, num_tokens: int) -> None:
    """Let the policy say as many letters as these at once, in every turn."""
    tokens, logprobs = np.full(num_tokens, 100, np.int32), np.zeros(num_tokens, np.float32)
    while True:
        event = await session.events.get()
        if isinstance(event, Ask):
            event.done(Response(event.request.request_id, tokens, logprobs, "length", 0))


def _conversation(endpoint: Endpoint, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Milliseconds of each call, by the clock and of the endpoint's thread."""
    request = GenerationRequest(0, np.full(8, 50, np.int32), 0, SamplingParams(max_new_tokens=2**30))
    session = Session(request, ProgramEnvironment(command="true", max_turns=options.turns))
    endpoint.loop.call_soon_threadsafe(endpoint.add, session)
    answering = asyncio.run_coroutine_threadsafe(_answer(session, options.turn_tokens), endpoint.loop)
    (thread,) = (thread.ident for thread in threading.enumerate() if thread.name == "endpoint")
    clock = time.pthread_getcpuclockid(thread or 0)
    client = http.client.HTTPConnection(endpoint.url.removeprefix("http://"))
    headers = {"Authorization": f"Bearer {session.key}"}
    asked = {"role": "user", "content": "o" * options.observation_tokens}
    messages, times = [asked], []
    for _ in range(options.turns):
        body = json.dumps({"model": "policy", "messages": messages})
        begin, cpu = time.perf_counter(), time.clock_gettime(clock)
        client.request("POST", "/v1/chat/completions", body, headers)
        answer = json.loads(client.getresponse().read())
        times.append((1e3 * (time.perf_counter() - begin), 1e3 * (time.clock_gettime(clock) - cpu)))
        messages += [answer["choices"][0]["message"], asked]
    client.close()
    answering.cancel()
    endpoint.loop.call_soon_threadsafe(endpoint.remove, session)
    return times


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    endpoint = Endpoint(
        Wording(TemplateDialogue(tokenizer), decoder(tokenizer), len(tokenizer)), host="127.0.0.1", port=0
    )
    _conversation(endpoint, options)
    rounds = [_conversation(endpoint, options) for _ in range(options.conversations)]
    endpoint.close()
    lines = [
        f"{options.conversations} conversations of {options.turns} turns with {options.turn_tokens} + "
        f"{options.observation_tokens} tokens a turn, medians",
        "| turn | a call, ms | CPU of the endpoint, ms |",
        "|---|---|---|",
    ]
    for turn in (0, options.turns - 1):
        wall, cpu = (statistics.median(times[turn][kind] for times in rounds) for kind in range(2))
        lines.append(f"| {turn + 1} | {wall:.1f} | {cpu:.1f} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark endpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-tokens", type=int, default=100)
    parser.add_argument("--observation-tokens", type=int, default=50)
    print("\n".join(run(parser.parse_args(argv))))


if __name__ == "__main__":
    run_command(main)
