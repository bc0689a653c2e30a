"""Processes that only rank 0 speaks for: they join engines, send to their own ones and hear at once of a failure."""

import asyncio
import base64
import os
import pickle
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.types import WeightBucket, WeightSpec
from dapo_mega.weight_sync.broadcast import BroadcastSender
from dapo_mega.weight_sync.shared_memory import SharedMemorySender
from tests.te_cpu.engines import gpu_stand_ins
from tests.unit.weight_sync.pushing import Pushing
from tests.unit.weight_sync.scripted_engines import OneSenderPerStage, ScriptedEngine, ScriptedFleet

from .launching import run_distributed

pytestmark = pytest.mark.distributed

# Longer than the test's deadline: whoever waits for a failed engine's timeout does not make it.
TIMEOUT_S = 600.0
STAGES = (0, 1, 1, 0)
FAULTS = ["none", "refuse", "none", "die", "none"]


def sync_of_two(fleet, timeout_s, parallel="pipeline", transport=BroadcastSender, device="cpu", **settings):
    """Collective, in a group of two processes, which are parallel in one way. `fleet` is rank 0's."""
    rank, group = dist.get_rank(), dist.group.WORLD
    kinds = ("data", "tensor", "pipeline", "context", "expert")
    sizes = {f"{kind}_size": 2 if kind == parallel else 1 for kind in kinds}
    ranks = {f"{kind}_rank": rank if kind == parallel else 0 for kind in kinds}
    processes = Processes(
        rank=rank, world_size=2, **sizes, **ranks,
        device=torch.device(device), control=group, leaders=group, replica=group,
    )  # fmt: skip
    config = WeightSyncConfig(timeout_s=timeout_s, **settings)
    return Pushing(processes, fleet, config, transport(processes, config))


class Policy(OneSenderPerStage):
    """One tensor per bucket; both stages know all values, so that rank 0 can compare."""

    def __init__(self, rank, version):
        random = torch.Generator().manual_seed(version)
        self._tensors = [torch.randn(6, generator=random) for _ in STAGES]
        self._rank = rank

    def buckets(self):
        for number, stage in enumerate(STAGES):
            specs = (WeightSpec(f"w{number}", torch.float32, (6,)),)
            tensors = [self._tensors[number]] if stage == self._rank else None
            yield WeightBucket(stage, specs, tensors, number == len(STAGES) - 1)

    def is_held_by(self, engine):
        names = [f"w{number}" for number in range(len(STAGES))]
        return engine.weights.keys() == set(names) and all(
            torch.equal(engine.weights[name], tensor) for name, tensor in zip(names, self._tensors, strict=True)
        )


def outcomes_of_faults(faults):
    """Two pipeline stages bring weights to three engines, one of which has a fault while the second stage sends. What
    each update came to, on rank 0."""
    rank = dist.get_rank()
    fleet = ScriptedFleet(3, TIMEOUT_S) if rank == 0 else None
    sync = sync_of_two(fleet, TIMEOUT_S)
    outcomes = []
    for version, fault in enumerate(faults, start=1):
        if fleet:
            fleet.return_all()
            fleet.engines["http://e1"].faults = {("update", 2): fault}
        policy = Policy(rank, version)
        metrics = sync.push(policy, version)
        if fleet:
            exact = [url for url, engine in fleet.engines.items() if policy.is_held_by(engine)]
            outcomes.append((exact, list(fleet.away), metrics["weight_sync/bytes"]))
    return outcomes


def test_every_stage_reaches_all_engines_but_the_one_that_fails():
    outcomes, _ = run_distributed(outcomes_of_faults, 2, FAULTS, timeout_s=200)
    for fault, outcome in zip(FAULTS, outcomes, strict=True):
        if fault == "none":
            assert outcome == (URLS, [], 4 * 6 * 4)
        else:
            assert outcome == (["http://e0", "http://e2"], ["http://e1"], 4 * 6 * 4)


SILENCE_LIMIT_S = 3.0
# What each engine stops at: a bucket of four, or its answer.
SILENCES = [{"e1": 1}, {"e1": 4}, {"e0": 2, "e2": 3}, {"e1": None}, {}]


def outcomes_of_silence(silences):
    """Two pipeline stages bring weights to engines that stop without a word. What each update came to, on rank 0."""
    rank = dist.get_rank()
    fleet = ScriptedFleet(3, SILENCE_LIMIT_S) if rank == 0 else None
    sync = sync_of_two(fleet, SILENCE_LIMIT_S)
    outcomes = []
    for version, silent in enumerate(silences, start=1):
        if fleet:
            fleet.return_all()
            fleet.without_plugin = set()
            for name, number in silent.items():
                call = ("update", number) if number else "acknowledge"
                fleet.engines[f"http://{name}"].faults = {call: "silence"}
        policy = Policy(rank, version)
        started = time.monotonic()
        sync.push(policy, version)
        if fleet:
            synced = [url[-2:] for url, number in fleet.synced_versions.items() if number == version]
            exact = {url[-2:] for url, engine in fleet.engines.items() if policy.is_held_by(engine)}
            outcomes.append((sorted(synced), set(synced) <= exact, sorted(fleet.away), time.monotonic() - started))
    if fleet:
        fleet.disconnect()
    return outcomes


def test_only_the_engines_that_stop_are_left_out_and_soon():
    outcomes, _ = run_distributed(outcomes_of_silence, 2, SILENCES, timeout_s=200)
    for silent, (synced, are_exact, away, seconds) in zip(SILENCES, outcomes, strict=True):
        assert synced == sorted({"e0", "e1", "e2"} - silent.keys())
        assert are_exact
        assert away == sorted(f"http://{name}" for name in silent)
        assert seconds < 3 * SILENCE_LIMIT_S


class BusyEngine(ScriptedEngine):
    """It has a GPU for each of two processes, and reads what is sent only when the sender has gone on, if that does."""

    went_on = None

    async def update_weights_from_tensor(self, *, serialized_named_tensors, weight_version, flush_cache):
        self.num_buckets += 1
        own_handles = set(serialized_named_tensors)  # A handle counts the readers of the memory, and each is for one.
        assert len(own_handles) == self.tp_size
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and not (self.went_on / f"{self.num_buckets}").exists():
            await asyncio.sleep(0.01)
        for handle, weights in zip(serialized_named_tensors, self.rank_weights, strict=True):
            weights |= {name: tensor.clone() for name, tensor in pickle.loads(base64.b64decode(handle))}
        self.versions.append((weight_version, flush_cache))


class GoingOn(Policy):
    """It notes which buckets have been sent."""

    def buckets(self):
        for number, bucket in enumerate(super().buckets(), start=1):
            yield bucket
            (self.folder / f"{number}").touch()


def push_through_memory_of_gpus(folder):
    """Two pipeline stages bring weights to an engine of two processes; whether both have them."""
    rank = dist.get_rank()
    os.environ[gpu_stand_ins.EVENTS] = str(folder / f"events_{rank}")
    gpu_stand_ins.send_from_a_gpu(pytest.MonkeyPatch())
    gpu_stand_ins.receive_from_a_gpu()
    url = "http://127.0.0.1:30000"
    fleet = ScriptedFleet(0, TIMEOUT_S) if rank == 0 else None
    if fleet:
        fleet.engines = {url: BusyEngine(url, TIMEOUT_S, tp_size=2)}
        fleet.engines[url].went_on = folder
        fleet.outdated = {url}
    policy = GoingOn(rank, 1)
    policy.folder = folder
    sync_of_two(fleet, TIMEOUT_S, transport=SharedMemorySender, device="cuda").push(policy, 1)
    return fleet and [policy.is_held_by(SimpleNamespace(weights=w)) for w in fleet.engines[url].rank_weights]


def test_every_process_of_an_engine_reads_each_bucket_before_its_memory_is_freed(tmp_path):
    assert run_distributed(push_through_memory_of_gpus, 2, tmp_path, timeout_s=100)[0] == [True, True]


URLS = ["http://e0", "http://e1", "http://e2"]
JOINING_LIMIT_S = 15.0


class EngineInTurn(ScriptedEngine):
    """It joins the groups of both stages once its predecessor is in those of its own."""

    predecessor = None

    async def init_weights_update_group(self, **group):
        while self.predecessor and len(self.predecessor.groups) < 2:
            await asyncio.sleep(0.005)
        await super().init_weights_update_group(**group)


def outcomes_of_joining(*turns):
    """New engines for each update, which join in these turns; then an update without the first engine. What each
    update came to, on rank 0: which engines have its weights, and which are away for what reason."""
    rank = dist.get_rank()
    fleet = ScriptedFleet(len(URLS), JOINING_LIMIT_S) if rank == 0 else None
    sync = sync_of_two(fleet, JOINING_LIMIT_S)

    def outcome_of(update, version):
        policy = Policy(rank, version)
        update(policy, version)
        return fleet and ([url for url in URLS if policy.is_held_by(fleet.engines[url])], dict(fleet.away))

    outcomes = []
    for version, urls in enumerate(turns, start=1):
        if fleet:
            fleet.return_all()
            fleet.engines = {url: EngineInTurn(url, JOINING_LIMIT_S) for url in URLS}
            fleet.outdated = set(URLS)
            for before, after in pairwise(urls):
                fleet.engines[after].predecessor = fleet.engines[before]
        outcomes.append(outcome_of(sync.push_to_outdated, version))
    if fleet:
        fleet.return_all()
        fleet.failed(URLS[0], "scripted")
        for engine in fleet.engines.values():
            engine.predecessor = None
    outcomes.append(outcome_of(sync.push, len(turns) + 1))
    return outcomes


def test_engines_that_join_at_once_meet_all_stages_in_whatever_order():
    """Each stage waits for all of them at a time, and what it calls an engine's group is with that engine."""
    outcomes, _ = run_distributed(outcomes_of_joining, 2, URLS, URLS[::-1], timeout_s=120)
    assert outcomes == [(URLS, {}), (URLS, {}), (URLS[1:], {URLS[0]: "scripted"})]


class OneMatrix:
    """A bf16 matrix, of which each version changes one row; every replica sends it whole."""

    def __init__(self, version):
        self.matrix = torch.zeros(100, 30, dtype=torch.bfloat16)
        for row in range(version + 1):
            self.matrix[row] = row + 1
        self._specs = (WeightSpec("w", torch.bfloat16, (100, 30)),)

    def weight_plan(self, bucket_bytes):
        return [[WeightBucket(0, self._specs, None, False)]]

    def weights(self, bucket_bytes, to, replicas):
        tensors = [self.matrix] if dist.get_rank() in replicas else None
        yield WeightBucket(0, self._specs, tensors, False)


def changes_by_replica():
    """Delta sync of two replicas with three engines. e1, the second replica's only one, dies and comes back. What each
    update came to, on rank 0: who has exactly the weights, and bytes and balance."""
    rank = dist.get_rank()
    fleet = ScriptedFleet(3, TIMEOUT_S) if rank == 0 else None
    sync = sync_of_two(fleet, TIMEOUT_S, "data", full_every=20)
    outcomes = []

    def update(version, push):
        policy = OneMatrix(version)
        metrics = push(policy, version)
        if fleet:
            engines = fleet.engines.items()
            exact = [url[-2:] for url, engine in engines if torch.equal(engine.weights["w"], policy.matrix)]
            sent = [metrics["weight_sync/bytes"], metrics["weight_sync/sender_balance"]]
            outcomes.append((exact, *sent, metrics.get("weight_sync/changed_share")))

    if fleet:
        fleet.without_plugin = set()
    update(0, sync.push)
    update(1, sync.push)
    if fleet:
        fleet.engines[URLS[1]].faults["update", 1] = "die"
    update(2, sync.push)
    update(3, sync.push)  # Nobody is left in the second replica.
    if fleet:
        fleet.return_all()
        fleet.engines[URLS[1]].weights.clear()
    update(3, sync.push_to_outdated)
    update(4, sync.push)
    return outcomes


def test_each_replica_sends_its_own_engines_what_they_lack():
    outcomes, _ = run_distributed(changes_by_replica, 2, timeout_s=120)
    everyone, first = ["e0", "e1", "e2"], ["e0", "e2"]
    assert [exact for exact, *_ in outcomes] == [everyone, everyone, first, first, everyone, everyone]
    full = [num_bytes > 100 * 30 * 2 for _, num_bytes, *_ in outcomes]
    assert full == [True, False, False, False, True, False], "only the engine that came back needs everything"
    balances = [balance for _, _, balance, *_ in outcomes]
    del balances[2]  # Whether something was begun for the engine that died.
    assert balances == pytest.approx([4 / 3, 4 / 3, 2, 2, 4 / 3])
    assert [share for *_, share in outcomes] == pytest.approx([None, 0.01, 0.01, 0.01, None, 0.01])
