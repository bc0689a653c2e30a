"""Engines are told to receive buckets in an order in which nobody waits for an engine that is behind."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from dapo_mega.engines.sglang.engine_client import EngineError
from dapo_mega.types import WeightSpec
from dapo_mega.weight_sync.buckets import EncodedBucket
from dapo_mega.weight_sync.delivery import Delivery, Sender

SPECS = (WeightSpec("w", torch.float32, (1,)),)


def rounds_of(num_rounds, num_stages=1, num_places=1):
    places = [(stage, place) for stage in range(num_stages) for place in range(num_places)]
    return [
        [EncodedBucket(stage, SPECS, str(number), None, place) for stage, place in places]
        for number in range(num_rounds)
    ]


class Run:
    """A delivery to engines whose `faults` map (URL, how many buckets they have) to what happens then."""

    def __init__(self, rounds, engines, faults=(), timeout_s=30.0):
        self.posted = []
        self.received = {url: [] for urls in engines.values() for url in urls}
        self.together = []
        self.most_at_a_sender = 0
        self._at = Counter()
        self._faults = dict(faults)
        self._rounds = rounds
        self._barrier = None
        self._pauses = random.Random(0)
        self._delivery = Delivery(rounds, engines, self._post, self._tell, timeout_s)

    def _post(self, sender, message):
        self.posted.append((sender, message.kind, message.urls))

    async def _tell(self, client, bucket, is_last):
        fault = self._faults.get((client.url, len(self.received[client.url])))
        if fault == "hang":
            await asyncio.sleep(60)
        elif fault:
            raise EngineError(client.url, fault)
        self._check_that_it_can_come(int(bucket.load_format), bucket)
        sender = (client.url[0], bucket.stage, bucket.place)
        self._at[sender] += 1
        self.most_at_a_sender = max(self.most_at_a_sender, self._at[sender])
        if self._barrier:
            self.together.append((bucket.stage, bucket.place))
            await self._barrier.wait()
        for _ in range(self._pauses.randint(0, 9)):
            await asyncio.sleep(0)
        self._at[sender] -= 1
        self.received[client.url].append((bucket.load_format, bucket.stage, bucket.place, is_last))

    def _check_that_it_can_come(self, number, bucket):
        """No sender still has a bucket for which this one's sender, or its gathering, waits."""
        done = [sender for sender, kind, _ in self.posted if kind == "done"]
        (sender,) = {s for s, kind, urls in self.posted[-1:] if kind == "send"}
        assert done.count(sender) == number
        if number > 1:
            assert all(done.count(each) >= number - 1 for each in {s for s, _, _ in self.posted})

    def go(self, in_step=0):
        """The errors by URL."""

        async def all_engines():
            self._barrier = asyncio.Barrier(in_step) if in_step else None
            clients = [SimpleNamespace(url=url) for url in self.received]
            return await asyncio.gather(*map(self._delivery.deliver, clients), return_exceptions=True)

        errors = asyncio.run(asyncio.wait_for(all_engines(), 30))
        return {url: str(error) for url, error in zip(self.received, errors, strict=True) if error}


def test_engines_in_step_are_always_at_different_senders():
    run = Run(rounds_of(3, num_stages=2, num_places=2), {0: ["a", "b", "c", "d"]})
    assert not run.go(in_step=4)
    steps = [set(run.together[start : start + 4]) for start in range(0, len(run.together), 4)]
    assert [len(senders) for senders in steps] == [4] * 12


def test_every_engine_gets_all_of_a_round_before_the_next_and_knows_its_last_bucket():
    run = Run(rounds_of(2, num_places=3), {0: ["a", "b"], 2: ["c"]})
    assert not run.go()
    for received in run.received.values():
        assert [number for number, *_ in received] == ["0"] * 3 + ["1"] * 3
        assert len({each[:3] for each in received}) == 6
        assert [is_last for *_, is_last in received] == [False] * 5 + [True]
    assert {sender.replica for sender, *_ in run.posted} == {0, 2}


@pytest.mark.parametrize(("num_engines", "num_places", "most"), [(4, 4, 1), (3, 4, 1), (5, 4, 2), (3, 1, 3)])
def test_engines_do_not_crowd_at_a_sender(num_engines, num_places, most):
    run = Run(rounds_of(9, num_places=num_places), {0: [f"e{number}" for number in range(num_engines)]})
    assert not run.go()
    assert run.most_at_a_sender == most


@pytest.mark.parametrize(
    ("fault", "num_received"), [*(("dies", number) for number in range(9)), ("hang", 0), ("hang", 4), ("hang", 8)]
)
def test_whoever_fails_takes_nobody_with_it(fault, num_received):
    """Others' time limits do not run while they wait for it, and its senders hear that they need not."""
    engines = {0: ["a", "b"], 1: ["c"]}
    run = Run(rounds_of(3, num_places=3), engines, {("b", num_received): fault}, 1.0 if fault == "hang" else 30.0)
    assert run.go() == {"b": "b: no answer within 1 s" if fault == "hang" else "b: dies"}
    assert [len(run.received[url]) for url in "abc"] == [9, num_received, 9]
    last = {sender: urls for sender, kind, urls in run.posted if kind == "done"}
    assert len([kind for _, kind, _ in run.posted if kind == "done"]) == 18
    assert all("a" in urls for sender, urls in last.items() if sender.replica == 0)


def test_a_replica_whose_engines_are_gone_sends_nothing():
    run = Run(rounds_of(1, num_places=2), {0: [], 1: ["a"]})
    assert not run.go()
    assert [(sender, kind) for sender, kind, _ in run.posted if sender.replica == 0] == [
        (Sender(0, 0, 0), "done"),
        (Sender(0, 0, 1), "done"),
    ]
