"""The embedded fleet answers one by one what its engine generates at once."""

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch.distributed as dist

from dapo_mega.distributed.event_loops import beside
from dapo_mega.engines.embedded.fleet import EmbeddedFleet
from dapo_mega.errors import StopRequested
from dapo_mega.types import GenerationRequest, Response, SamplingParams


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class CountingEngine:
    """Notes which requests it gets together."""

    weight_version = 4

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.is_stopped = False

    def generate(self, requests):
        if self.is_stopped:
            raise StopRequested("told so")
        self.batches.append([request.request_id for request in requests])
        return [Response(r.request_id, np.ones(1, np.int32), np.zeros(1, np.float32), "stop", 4) for r in requests]

    def close(self):
        """As of `EmbeddedEngine`."""


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def fleet(engine) -> Iterator[EmbeddedFleet]:
    made = EmbeddedFleet(engine)
    yield made
    made.close()


def asked(fleet, *ids):
    return [fleet.generate(GenerationRequest(i, np.array([i // 4], np.int32), i, SamplingParams())) for i in ids]


async def answers(generations):
    return [response.request_id for response in await asyncio.gather(*generations)]


def test_all_that_was_asked_is_generated_in_one_batch_when_everybody_waits(fleet, engine):
    async def twice():
        first = asyncio.ensure_future(answers(asked(fleet, 4, 5)))
        assert not engine.batches
        second = asked(fleet, 2, 3)
        assert [generation.oldest_version() for generation in second] == [4, 4]
        return await first + await answers(second) + await answers(asked(fleet, 9))

    assert fleet.run(twice()) == [4, 5, 2, 3, 9]
    # In the order of the numbers, whoever asked first: that may depend on how fast environments are.
    assert engine.batches == [[2, 3, 4, 5], [9]]


def test_an_engine_waits_for_what_runs_beside_the_loop(fleet, engine):
    async def scored():
        generation = fleet.generate(GenerationRequest(1, np.array([1], np.int32), 1, SamplingParams()))
        num_batches = await beside(lambda: time.sleep(0.3) or len(engine.batches))
        await generation
        return num_batches

    assert fleet.run(scored()) == 0


def test_what_is_cancelled_is_not_generated(fleet, engine):
    async def two_of_three():
        first, second, third = asked(fleet, 1, 2, 3)
        second.cancel()
        return await answers([first, third])

    assert fleet.run(two_of_three()) == [1, 3]
    assert engine.batches == [[1, 3]]


def test_what_a_stop_interrupted_is_not_generated_later(fleet, engine):
    engine.is_stopped = True
    with pytest.raises(StopRequested):
        fleet.run(answers_of(fleet, 1))
    engine.is_stopped = False
    assert fleet.run(answers_of(fleet, 2)) == [2]


async def answers_of(fleet, *ids):
    return await answers(asked(fleet, *ids))


def test_a_stop_does_not_wait_for_what_runs_beside_the_loop(engine):
    let = threading.Event()

    def stopped():
        raise StopRequested("told so")

    fleet = EmbeddedFleet(engine, stopped)
    with pytest.raises(StopRequested):
        fleet.run(beside(lambda: let.wait(60)))
    let.set()
    fleet.close()


def test_waiting_for_nothing_is_an_error(fleet):
    with pytest.raises(RuntimeError, match="every task waits, and no request is open"):
        fleet.run(asyncio.Event().wait())
