"""Engines pass on what they receive: in order, once, and without waiting for each other."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from dapo_mega.distributed.stores import connect_store, open_store
from dapo_mega.engines.sglang.weight_protocol import (
    PassedOn,
    PiecesFormat,
    failure_key,
    limited_group,
    meeting_key,
    relay_group,
    weight_specs,
)
from dapo_mega.sglang_plugin import relaying
from dapo_mega.sglang_plugin.receiving import ArrivingWeights
from dapo_mega.sglang_plugin.relaying import Arrival, Follower, RelayFailed, Relays
from dapo_mega.weight_sync.engine_groups import join_group
from tests.te_cpu.engines import gpu_stand_ins

ADDRESS = "127.0.0.1"
NAME = limited_group(relay_group("run-0"), 20.0)


class Sending:
    """A group whose broadcasts end when `is_over` says so, and fail if it `breaks`."""

    def __init__(self, breaks=False):
        self.sent = []
        self.is_over = True
        self.is_aborted = False
        self._breaks = breaks

    def broadcast(self, chunk, root):
        self.sent.append(int(chunk[0]))
        return self

    def is_completed(self):
        return self.is_over

    def wait(self):
        if self._breaks:
            raise RuntimeError("connection closed by peer")

    def abort(self):
        self.is_aborted = True


def chunk(number):
    return torch.tensor([number], dtype=torch.uint8)


def test_a_bucket_that_must_be_received_again_is_passed_on_from_where_it_stopped():
    follower = Follower(NAME, Sending())
    follower.begin("update 7, bucket 0")
    for number in range(3):
        follower.pass_on(chunk(number))
    follower.begin("update 7, bucket 0")
    for number in range(5):
        follower.pass_on(chunk(number))
    follower.begin("update 7, bucket 1")
    follower.pass_on(chunk(9))
    assert follower.group.sent == [0, 1, 2, 3, 4, 9]


def test_nothing_more_goes_to_an_engine_that_is_gone():
    follower = Follower(NAME, Sending(breaks=True))
    follower.begin("bucket")
    for number in range(3):
        follower.pass_on(chunk(number))
    assert follower.group.sent == [0]


@pytest.fixture
def chain():
    """This engine's side, with an engine behind it that has taken nothing yet."""
    relays = Relays()
    follower = relays._follower = Follower(NAME, Sending())
    relays.follower(PassedOn("bucket 0", NAME))
    follower.pass_on(chunk(0))
    follower.group.is_over = False
    return relays, follower


@pytest.mark.parametrize("end", ["update", "relay"])
def test_an_engine_behind_that_takes_nothing_is_given_up(chain, end):
    relays, follower = chain
    if end == "update":
        relays.settle()
    else:
        relays.follower(None)
    assert follower.group.is_aborted
    assert relays.follower(PassedOn("bucket 1", NAME)) is None
    assert len(relays._given_up) == 1, "freeing the group now would wait for it"
    follower.group.is_over = True
    relays.settle()
    assert not relays._given_up


def test_what_is_still_on_its_way_delays_no_further_bucket(chain):
    relays, follower = chain
    assert relays.follower(PassedOn("bucket 1", NAME)) is follower
    follower.pass_on(chunk(1))
    assert follower.group.sent == [0, 1]


@pytest.fixture
def store():
    return open_store(ADDRESS, 30)


def joined(relays, store, rank, size=2, device="cpu"):
    place = {"address": ADDRESS, "port": store.port, "rank": rank, "world_size": size}
    return relays.join(NAME, **place, device=device, is_sender=rank == 0)


@pytest.fixture
def pair(store):
    """The sides of two engines, of which the first passes on to the second."""
    sides = Relays(), Relays()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(joined, sides, [store] * 2, range(2)))
    return sides


def test_what_comes_to_a_gpu_is_there_when_the_wait_for_it_ends(store, monkeypatch):
    """The wait of NCCL's works makes the stream wait, not the thread, which could not hear then that the engine is
    gone."""
    gpu_stand_ins.have_nccl(monkeypatch)
    sides = Relays(), Relays()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda side, rank: joined(side, store, rank, device="cuda"), sides, range(2)))

    class Coming:
        questions = 0

        def is_completed(self):
            self.questions += 1
            return self.questions > 3

        def wait(self, timeout=None):
            assert self.questions > 3
            return True

    source = sides[1].source(NAME)
    assert Arrival(Coming(), source).wait()
    source._limit_s = 0.0
    source._watch = SimpleNamespace(is_alive=lambda: True)
    with pytest.raises(RelayFailed, match="has not answered"):
        Arrival(SimpleNamespace(is_completed=lambda: False), source).wait()


SPECS = weight_specs("ab", ["float32"] * 2, [(3,), (2**20,)])  # Two pieces, of which the second has two chunks.
PIECES = PiecesFormat((1, 1), 0)


def test_an_engine_gets_what_the_one_before_it_gets(pair, store):
    before, behind = pair
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(
            join_group, connect_store(ADDRESS, store.port, 30), "g", 2, torch.device("cpu"), ADDRESS, 30.0
        )
        mine = join_group(connect_store(ADDRESS, store.port, 30), "g", 2, torch.device("cpu"), ADDRESS, 30.0, rank=1)
        trainer = other.result()
    tensors = [torch.arange(3.0), torch.randn(2**20)]
    works = [trainer.broadcast(part, 0) for t in tensors for part in t.view(torch.uint8).split(2**21)]
    got = ArrivingWeights(mine, "cpu", SPECS, PIECES, None, before.follower(PassedOn("bucket", NAME)))
    got = [tensor.clone() for _, tensor in got]
    passed = [tensor.clone() for _, tensor in ArrivingWeights(behind.source(NAME), "cpu", SPECS, PIECES)]
    assert all(torch.equal(mine, other) for mine, other in zip([*got, *got], [*tensors, *passed], strict=True))
    assert len(works) == 3


class Silent:
    """A store that does not answer."""

    def __init__(self):
        self.ends = threading.Event()

    def check(self, keys):
        self.ends.wait()
        return False


@pytest.mark.parametrize("reason", ["is gone", "has not answered"])
def test_an_engine_waits_for_another_one_only_as_long_as_the_trainer_does(pair, store, reason):
    before, behind = pair
    source = behind.source(NAME)
    silent = Silent()
    if reason == "is gone":
        threading.Timer(0.2, store.set, (failure_key(NAME), "")).start()
    else:
        source._store, source._limit_s = silent, 0.2
    weights = ArrivingWeights(source, "cpu", SPECS, PIECES)
    with pytest.raises(RelayFailed, match=reason):
        list(weights)
    silent.ends.set()
    assert weights.is_broken
    assert ArrivingWeights(behind.source(NAME), "cpu", SPECS, PIECES).is_broken is False  # Until it is read.
    with pytest.raises(RelayFailed):
        list(ArrivingWeights(behind.source(NAME), "cpu", SPECS, PIECES))
    behind.settle()
    assert behind.source(NAME) is None
    before.follower(PassedOn("bucket", NAME)).pass_on(torch.zeros(12, dtype=torch.uint8))  # Or freeing it takes 20 s.


def test_a_new_neighbour_takes_the_place_of_the_old_one(pair, store):
    """An engine has one group with each side, however often others leave and join."""
    before, behind = pair
    after = limited_group(relay_group("run-1"), 20.0)
    with ThreadPoolExecutor(2) as threads:
        place = {"address": ADDRESS, "port": store.port, "world_size": 2, "device": "cpu"}
        joins = [
            threads.submit(side.join, after, rank=rank, is_sender=rank == 0, **place)
            for rank, side in enumerate((before, behind))
        ]
        assert [join.result() for join in joins] == [None, None]
    assert before._follower.name == behind._source.name == after


def test_nothing_that_has_come_is_kept(pair):
    before, behind = pair
    source, follower = behind.source(NAME), before.follower(PassedOn("bucket", NAME))
    for tensor in (torch.arange(3.0), torch.randn(2**20)):
        for part in tensor.view(torch.uint8).split(2**21):
            follower.pass_on(part)
    assert len(list(ArrivingWeights(source, "cpu", SPECS, PIECES))) == 2
    assert not source._works
    before.settle()
    assert not follower._works


@pytest.mark.parametrize("reason", ["failed", "late"])
def test_an_engine_does_not_wait_long_for_one_that_does_not_join(store, reason, monkeypatch):
    if reason == "failed":
        store.compare_set(meeting_key(NAME), "", "the other side will not come")
    else:
        monkeypatch.setattr(relaying, "_JOINING_LIMIT_S", 0.2)
    started = time.monotonic()
    with pytest.raises((RelayFailed, TimeoutError), match="will not come" if reason == "failed" else "within"):
        joined(Relays(), store, 1)
    assert time.monotonic() - started < 15


def test_the_load_format_says_who_is_next():
    order = PassedOn("7-0-0-1", NAME)
    assert PassedOn.split_from(order.added_to("dapo_mega_pieces:1:2,3")) == ("dapo_mega_pieces:1:2,3", order)
    assert PassedOn.split_from("dapo_mega_changes") == ("dapo_mega_changes", None)
