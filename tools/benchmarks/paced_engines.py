"""Scripted engines at a stated pace: the more responses the longer a decoding step, and lengths are log-normal.

python tools/benchmarks/paced_engines.py --engines 4 --places 16 --base-ms 10 --per-response-ms 0.5 --mean 60

The URLs are printed, one a line. What an engine says follows a rule, as tools/scripted_engine.py does; a response ends
with one of the stop tokens that its request names, at a length that follows from the request's seed alone.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripted_engine import Generation, ScriptedEngine, next_token

_TICK_S = 0.01


class PacedEngine(ScriptedEngine):
    """One server that decodes at most `places` responses at once, each by one token in every
    `base_s + per_response_s x their number` seconds. A request's response has a length drawn with its seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options.vocab_size, tokens_per_s=1.0, api_key=options.api_key)
        self._options = options
        self._decoding: list[Generation] = []
        self._waiting: list[Generation] = []
        self._ended: dict[int, asyncio.Event] = {}

    async def _answer(self, payload: dict[str, Any], ends_early: bool = False) -> dict[str, Any]:
        limit = payload["sampling_params"]["max_new_tokens"]
        if "rid" in payload:
            # What was generated before an update is part of the prompt, and less may follow.
            length = self._length(payload["sampling_params"]["sampling_seed"])
            payload["sampling_params"]["max_new_tokens"] = max(1, min(limit, length - (self._options.longest - limit)))
        answer = await super()._answer(payload, ends_early)
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "length" and len(answer["output_ids"]) < limit:
            stop = payload["sampling_params"]["stop_token_ids"][0]
            answer["output_ids"][-1] = answer["meta_info"]["output_token_logprobs"][-1][1] = stop
            reason["type"] = "stop"
        return answer

    def _length(self, seed: int) -> int:
        options = self._options
        drawn = np.random.default_rng(seed).standard_normal()
        tokens = math.exp(math.log(options.mean) - options.spread**2 / 2 + options.spread * drawn)
        return max(1, min(round(tokens), options.longest))

    async def _run(self, generation: Generation) -> None:
        event = self._ended[id(generation)] = asyncio.Event()
        self._waiting.append(generation)
        try:
            await event.wait()
        finally:
            del self._ended[id(generation)]
            for held in (self._waiting, self._decoding):
                if generation in held:
                    held.remove(generation)

    async def decode(self) -> None:
        """Decode for ever."""
        loop = asyncio.get_running_loop()
        last, due = loop.time(), 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now = loop.time()
            due += 0.0 if self._is_paused else now - last
            last = now
            while True:
                self._take_in_and_out()
                step_s = self._options.base_ms / 1e3 + self._options.per_response_ms / 1e3 * len(self._decoding)
                if not self._decoding or due < step_s:
                    break
                due -= step_s
                for generation in self._decoding:
                    self._add_token(generation)
            if not self._decoding:
                due = 0.0

    def _take_in_and_out(self) -> None:
        for generation in [*self._decoding, *self._waiting]:
            if generation.finish():
                self._ended[id(generation)].set()
                (self._decoding if generation in self._decoding else self._waiting).remove(generation)
        while self._waiting and len(self._decoding) < self._options.places:
            self._decoding.append(self._waiting.pop(0))

    def _add_token(self, generation: Generation) -> None:
        super()._add_token(generation)
        if generation.output[-1] in generation.stop_token_ids:  # It ends by its length only.
            token = next_token([generation.output[-1] + 1], self.vocab_size)
            generation.output[-1] = generation.context[-1] = token


async def _serve(options: argparse.Namespace) -> None:
    engines = [PacedEngine(options) for _ in range(options.engines)]
    decoding = []
    for engine in engines:
        engine.version = "0"
        print(await engine.start(), flush=True)
        decoding.append(asyncio.create_task(engine.decode()))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    ending = asyncio.create_task(ended.wait())
    await asyncio.wait([*decoding, ending], return_when=asyncio.FIRST_COMPLETED)
    for task in decoding:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*(engine.stop() for engine in engines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--places", type=int, default=16, help="responses that an engine decodes at once")
    parser.add_argument("--base-ms", type=float, default=10.0, help="of a decoding step")
    parser.add_argument("--per-response-ms", type=float, default=0.5, help="of a decoding step, for each response")
    parser.add_argument("--mean", type=float, default=60.0, help="mean tokens of a response")
    parser.add_argument("--spread", type=float, default=0.9, help="standard deviation of the lengths' logarithms")
    parser.add_argument("--longest", type=int, default=256, help="rollout.max_response_tokens")
    parser.add_argument("--vocab-size", type=int, default=200)
    parser.add_argument("--api-key", default="secret")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
