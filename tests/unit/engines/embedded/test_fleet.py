"""The embedded fleet answers one by one what its engine generates at once."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

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


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def fleet(engine) -> EmbeddedFleet:
    return EmbeddedFleet(SimpleNamespace(rank=0, data_size=1, is_leader=True, leaders=dist.group.WORLD), engine)


def make_requests(*ids):
    return [GenerationRequest(i, np.array([i // 4], np.int32), i, SamplingParams()) for i in ids]


def test_all_that_was_submitted_is_generated_in_one_batch(fleet, engine):
    fleet.submit(make_requests(4, 5))
    fleet.submit(make_requests(2, 3))
    assert fleet.poll_answer() is None
    assert engine.batches == []
    assert fleet.oldest_versions([2, 5, 9]) == {2: 4, 5: 4}
    assert fleet.next_answer().request_id == 4
    assert engine.batches == [[4, 5, 2, 3]]
    assert fleet.oldest_versions([2, 5]) == {}
    assert [fleet.poll_answer().request_id for _ in range(3)] == [5, 2, 3]
    assert fleet.poll_answer() is None


def test_what_is_cancelled_is_not_generated(fleet, engine):
    fleet.submit(make_requests(1, 2, 3))
    fleet.cancel([2, 99])
    assert [fleet.next_answer().request_id for _ in range(2)] == [1, 3]
    assert engine.batches == [[1, 3]]


def test_what_a_stop_interrupted_is_not_generated_later(fleet, engine):
    fleet.submit(make_requests(1))
    engine.is_stopped = True
    with pytest.raises(StopRequested):
        fleet.next_answer()
    engine.is_stopped = False
    fleet.submit(make_requests(2))
    assert fleet.next_answer().request_id == 2
