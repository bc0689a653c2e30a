"""Cost of environments in processes of their own: CPU, memory and delay of many open trajectories.

python tools/benchmark.py environments

All trajectories are begun at once, with turns of the policy that are answered at once and environments that sleep in
every call; a few sleep long, and are given up when the others are over. The same environments are then called in
threads of this process, which is the least that turns can cost, and after which the figures of processes are divided.
Memory is resident, beyond what one trajectory of each process takes, when half of the turns are over.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from sleeping_environment import Sleeping

from dapo_mega.cli import run_command
from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.distributed.event_loops import beside
from dapo_mega.engines.protocol import Generation
from dapo_mega.environments.base import Progress
from dapo_mega.environments.dialogues import BareText
from dapo_mega.environments.observations import Observation, read_observation
from dapo_mega.environments.pool import EnvironmentPool
from dapo_mega.environments.turns import Turns
from dapo_mega.types import GenerationRequest, Prompt, Response, SamplingParams

_PROMPT_TOKENS = 100


@dataclass(frozen=True)
class _Cost:
    """CPU in milliseconds per turn and memory in KB per open trajectory, each of this process and of the others;
    `wall` over what the sleeps take, the slowest ordinary trajectory over the median one, and the longest wait for an
    observation over the median one."""

    cpu_ms: tuple[float, float]
    memory_kb: tuple[float, float]
    wall: float
    slowest: float
    longest: float


class _InThread:
    """An environment that is called in threads of this process."""

    def __init__(self) -> None:
        self._made = Sleeping()

    async def observe(self, method: str, *arguments: Any) -> tuple[Any, Observation, str]:
        """See `LiveEnvironment`."""
        returned = await beside(lambda: getattr(self._made, method)(*arguments))
        return returned, read_observation(returned, method), ""

    def close(self) -> None:
        """Nothing."""


class _Threads(EnvironmentPool):
    """Makes environments in this process."""

    async def open(self) -> Any:
        """See `EnvironmentPool`."""
        return _InThread()


class _Answered(Generation):
    """A turn of the policy that is there at once."""

    def oldest_version(self) -> int:
        """See `Generation`."""
        return 0


class _Engine:
    """Answers every turn with as many tokens as it may have. `num_turns` is how many it had."""

    def __init__(self) -> None:
        self.num_turns = 0

    def generate(self, request: GenerationRequest) -> Generation:
        """See `Generate`."""
        self.num_turns += 1
        length = request.sampling.max_new_tokens
        tokens, logprobs = np.full(length, 100, np.int32), np.zeros(length, np.float32)
        answer = _Answered(request, asyncio.get_running_loop())
        answer.answer(Response(request.request_id, tokens, logprobs, "length", 0))
        return answer


class _Meter:
    """What this process and those that it has started use: CPU in seconds, memory in bytes."""

    def __init__(self) -> None:
        me = psutil.Process()
        self._sides = ([me], me.children(recursive=True))
        self._cpu, self._memory = self._cpu_s(), self._resident()

    def _cpu_s(self) -> list[float]:
        times = [[process.cpu_times() for process in side] for side in self._sides]
        return [sum(of.user + of.system for of in side) for side in times]

    def _resident(self) -> list[int]:
        return [sum(process.memory_info().rss for process in side) for side in self._sides]

    def cpu(self) -> tuple[float, float]:
        """Since it was made, of this process and of the others."""
        mine, others = (now - before for now, before in zip(self._cpu_s(), self._cpu, strict=True))
        return mine, others

    def memory(self) -> tuple[float, float]:
        """As `cpu`."""
        mine, others = (float(now - before) for now, before in zip(self._resident(), self._memory, strict=True))
        return mine, others


async def _measured(turns: Turns, options: argparse.Namespace) -> _Cost:
    """What the trajectories cost."""
    rows = options.turns * (options.turn_tokens + options.observation_tokens)
    walls: list[float] = []
    waits: defaultdict[float, list[float]] = defaultdict(list)
    engine = _Engine()

    async def play(number: int, call_s: float) -> None:
        fields = {"call_s": call_s, "text": "o" * options.observation_tokens}
        prompt = Prompt(number, "?", np.full(_PROMPT_TOKENS, 50, np.int32), "", fields=fields)
        request = GenerationRequest(number, prompt.token_ids, number, SamplingParams(max_new_tokens=rows))
        begin = since = time.monotonic()

        def generate(request: GenerationRequest) -> Generation:
            nonlocal since
            since, before = time.monotonic(), since
            waits[call_s].append(since - before)
            return engine.generate(request)

        await turns.run(prompt, request, generate, Progress())
        walls.append(time.monotonic() - begin)

    await asyncio.gather(*(play(number, 0.0) for number in range(options.workers)))
    walls.clear()
    engine.num_turns, meter, begin = 0, _Meter(), time.monotonic()
    slow = [asyncio.create_task(play(number, options.slow_s)) for number in range(options.slow)]
    ordinary = [asyncio.create_task(play(number, options.call_s)) for number in range(options.trajectories)]
    while engine.num_turns * 2 < options.trajectories * options.turns:
        await asyncio.sleep(options.call_s)
    used = meter.memory()
    await asyncio.gather(*ordinary)
    wall, cpu, num_turns = time.monotonic() - begin, meter.cpu(), engine.num_turns
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    num_open = options.trajectories + options.slow
    return _Cost(
        (1e3 * cpu[0] / num_turns, 1e3 * cpu[1] / num_turns),
        (used[0] / 1e3 / num_open, used[1] / 1e3 / num_open),
        wall / (options.turns * options.call_s),
        max(walls) / statistics.median(walls),
        max(waits[options.call_s]) / statistics.median(waits[options.call_s]),
    )


def _play(kind: type[EnvironmentPool], options: argparse.Namespace) -> _Cost:
    own = OwnEnvironment(
        path=f"{Path(__file__).with_name('sleeping_environment.py')}:Sleeping",
        num_workers=options.workers,
        max_turns=options.turns,
        max_turn_tokens=options.turn_tokens,
        max_observation_tokens=options.observation_tokens,
    )
    turns = Turns(own, kind(own), BareText(build_byte_tokenizer()))
    try:
        return asyncio.run(_measured(turns, options))
    finally:
        turns.close()


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    costs: dict[str, list[_Cost]] = {"in processes": [], "in threads of the trainer": []}
    # Each in a process of its own, as memory that was freed is used again.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as trainers:
        for _ in range(options.rounds):
            for rounds, kind in zip(costs.values(), (EnvironmentPool, _Threads), strict=True):
                rounds.append(trainers.submit(_play, kind, options).result())
    ratios = [ours.cpu_ms[0] / theirs.cpu_ms[0] for ours, theirs in zip(*costs.values(), strict=True)]
    return [
        f"{options.trajectories} trajectories of {options.turns} turns with {1e3 * options.call_s:g} ms a call, and "
        f"{options.slow} with {options.slow_s:g} s; {options.turn_tokens} + {options.observation_tokens} tokens a "
        f"turn, {options.workers} processes, medians of {options.rounds}",
        f"the trainer's CPU with processes over that with threads: {statistics.median(ratios):.2f}",
        "| environments | CPU of a turn, trainer, ms | others, ms | memory of a trajectory, trainer, KB | others, KB "
        "| wall over sleeps | slowest over median | longest wait over median |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {name} | {_row(rounds)} |" for name, rounds in costs.items()),
    ]


def _row(rounds: Sequence[_Cost]) -> str:
    def median(key: str, side: int | None = None) -> float:
        values = [getattr(cost, key) for cost in rounds]
        return statistics.median(values if side is None else [value[side] for value in values])

    columns = [f"{median('cpu_ms', side):.2f}" for side in range(2)]
    columns += [f"{median('memory_kb', side):.0f}" for side in range(2)]
    return " | ".join([*columns, f"{median('wall'):.1f}", f"{median('slowest'):.2f}", f"{median('longest'):.1f}"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark environments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--call-s", type=float, default=0.05, help="that a call of an environment sleeps")
    parser.add_argument("--slow", type=int, default=20, help="further trajectories, whose environments are slow")
    parser.add_argument("--slow-s", type=float, default=2.0)
    parser.add_argument("--turn-tokens", type=int, default=100)
    parser.add_argument("--observation-tokens", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    print("\n".join(run(parser.parse_args(argv))))


if __name__ == "__main__":
    run_command(main)
