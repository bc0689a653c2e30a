"""How everybody but training asks for k responses per prompt: the numbers of requests, and asking them in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from dapo_mega.engines.protocol import Generation
from dapo_mega.rollout.beside import beside
from dapo_mega.rollout.environment import Generate
from dapo_mega.types import Answer, GenerationRequest, Prompt, Response, SamplingParams

# Apart from training's, which begin at 0, so that no response is drawn with the random numbers of another purpose.
EVALUATION_IDS: Final = 1 << 62
DIFFICULTY_IDS: Final = 1 << 61


@dataclass(frozen=True)
class Numbering:
    """`k` requests per prompt. Their ids follow one another from `first_id` on; the ids and the run's seed alone decide
    their seeds, so those who ask the same prompts again get the same random numbers."""

    first_id: int
    k: int
    seed: int
    sampling: SamplingParams

    def of(self, index: int, prompt: Prompt) -> list[GenerationRequest]:
        """The requests of the prompt with this index."""
        first = self.first_id + index * self.k
        return [
            GenerationRequest(number, prompt.token_ids, (self.seed << 64) | number, self.sampling)
            for number in range(first, first + self.k)
        ]

    def index_of(self, request_id: int) -> int:
        """The index of the prompt that was asked."""
        return (request_id - self.first_id) // self.k


async def answers_of(generations: Iterable[Generation]) -> list[Answer]:
    """The responses and failures, in the order given. To cancel it gives all requests up."""
    found = await asyncio.gather(*generations, return_exceptions=True)
    answers = [answer for answer in found if isinstance(answer, Answer)]
    if len(answers) < len(found):
        raise next(error for error in found if not isinstance(error, Answer))
    return answers


async def ask_in_parts(
    generate: Generate,
    parts: Iterable[tuple[int, Sequence[GenerationRequest]]],
    use: Callable[[int, list[Answer]], None],
    most_open: int,
) -> None:
    """Ask the requests of numbered parts. `use` gets a part's number and answers when all of them are there: beside the
    event loop, one part at a time.

    As there may be millions, the next part is asked, as a whole, when fewer than `most_open` requests are open and no
    answers are in use. What `use` raises is raised, and gives the open requests up.
    """
    waiting = iter(parts)
    open_ones: dict[asyncio.Future[Response], tuple[int, list[Generation]]] = {}
    ended: asyncio.Queue[asyncio.Future[Response]] = asyncio.Queue()
    try:
        while True:
            while len(open_ones) < most_open and (part := next(waiting, None)):
                number, requests = part
                generations = [generate(request) for request in requests]
                for generation in generations:
                    open_ones[generation] = number, generations
                    generation.add_done_callback(ended.put_nowait)
            if not open_ones:
                return
            number, generations = open_ones.pop(await ended.get())
            if open_ones.keys().isdisjoint(generations):
                await beside(partial(use, number, await answers_of(generations)))
    finally:
        for still_open in open_ones:
            still_open.cancel()
