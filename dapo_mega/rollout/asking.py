"""How requests are numbered and seeded, and how everybody but training asks for k responses per prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from dapo_mega.distributed.event_loops import beside
from dapo_mega.environments.base import SINGLE_TURN, Environment, Generate, Progress
from dapo_mega.types import GenerationFailure, GenerationRequest, Prompt, SamplingParams, Trajectory

# Apart from training's, which begin at 0, so that no response is drawn with the random numbers of another purpose.
EVALUATION_IDS: Final = 1 << 62
DIFFICULTY_IDS: Final = 1 << 61

Rollout = Trajectory | GenerationFailure


def numbered(
    number: int, prompt: Prompt, seed: int, sampling: SamplingParams, routes_from: int | None = None
) -> GenerationRequest:
    """The request with this id. The id and the run's `seed` alone decide its own, so responses do not depend on
    timing, and those who ask the same prompts again get the same random numbers."""
    return GenerationRequest(number, prompt.token_ids, (seed << 64) | number, sampling, routes_from=routes_from)


@dataclass(frozen=True)
class Numbering:
    """`k` requests per prompt. Their ids follow one another from `first_id` on."""

    first_id: int
    k: int
    seed: int
    sampling: SamplingParams

    def of(self, index: int, prompt: Prompt) -> list[GenerationRequest]:
        """The requests of the prompt with this index."""
        first = self.first_id + index * self.k
        return [numbered(number, prompt, self.seed, self.sampling) for number in range(first, first + self.k)]

    def index_of(self, request_id: int) -> int:
        """The index of the prompt that was asked."""
        return (request_id - self.first_id) // self.k


async def _or_failure(trajectory: Awaitable[Trajectory]) -> Rollout:
    try:
        return await trajectory
    except GenerationFailure as failure:
        return failure


async def roll_out(
    asked: Iterable[tuple[Prompt, GenerationRequest]], generate: Generate, environment: Environment
) -> list[Rollout]:
    """A trajectory for each request of a prompt, or why there is none, in the order given. To cancel it gives all
    requests up."""
    return await asyncio.gather(
        *(_or_failure(environment.run(prompt, request, generate, Progress())) for prompt, request in asked)
    )


async def ask_in_parts(
    generate: Generate,
    parts: Iterable[tuple[int, Sequence[tuple[Prompt, GenerationRequest]]]],
    use: Callable[[int, list[Rollout]], None],
    most_open: int,
) -> None:
    """Ask numbered parts of requests of prompts, each for a single answer. `use` gets a part's number and what
    `roll_out` gives when all of it is there: beside the event loop, one part at a time.

    As there may be millions, the next part is asked, as a whole, when fewer than `most_open` requests are open and no
    part is in use. What `use` raises is raised, and gives the open requests up.
    """

    waiting = iter(parts)
    open_ones: dict[asyncio.Task[Rollout], tuple[int, list[asyncio.Task[Rollout]]]] = {}
    ended: asyncio.Queue[asyncio.Task[Rollout]] = asyncio.Queue()
    try:
        while True:
            while len(open_ones) < most_open and (part := next(waiting, None)):
                number, asked = part
                runs = [SINGLE_TURN.run(prompt, request, generate, Progress()) for prompt, request in asked]
                tasks = [asyncio.create_task(_or_failure(run)) for run in runs]
                for task in tasks:
                    open_ones[task] = number, tasks
                    task.add_done_callback(ended.put_nowait)
            if not open_ones:
                return
            number, tasks = open_ones.pop(await ended.get())
            if open_ones.keys().isdisjoint(tasks):
                await beside(partial(use, number, [task.result() for task in tasks]))
    finally:
        for still_open in open_ones:
            still_open.cancel()
