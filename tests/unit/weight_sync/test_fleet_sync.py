"""A fleet gets complete weights whatever single engines do, and a failed engine is named, left out and taken back."""

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dapo_mega.config import WeightSyncConfig
from dapo_mega.engines.sglang.weight_protocol import join_group
from dapo_mega.errors import FleetError
from dapo_mega.weight_sync.agreement import Agreement
from dapo_mega.weight_sync.broadcast import BroadcastSender, _have_succeeded
from dapo_mega.weight_sync.shared_memory import SharedMemorySender

from .made_weights import TIMEOUT_S, URLS, Policy, SlowlyChanging, WithAdapters, holders
from .pushing import Pushing
from .scripted_engines import ScriptedEngine

LOCAL_URL = "http://127.0.0.1:30000"


class Watched:
    """A group that counts, keeps the broadcasts of all groups, and whether each found those before it completed."""

    def __init__(self, group, works, found_completed):
        self._group = group
        self._works = works
        self.found_completed = found_completed
        self.num_broadcasts = self.num_aborts = 0

    def abort(self):
        self.num_aborts += 1
        self._group.abort()

    def broadcast(self, tensor, root):
        self.found_completed.append(all(work.is_completed() for work in self._works))
        self.num_broadcasts += 1
        self._works.append(self._group.broadcast(tensor, root))
        return self._works[-1]


NUM_BYTES = 4 * 3 * (5 + 6 + 7) + 2 * 3 * (8 + 9 + 10)


def test_every_engine_gets_the_exact_weights_and_the_version_last(sync, fleet):
    policy = Policy().advance()
    metrics = sync.push(policy, 7)
    assert holders(fleet, policy) == URLS
    assert fleet.synced_versions == dict.fromkeys(URLS, 7)
    assert metrics["weight_sync/engines"] == 3
    assert metrics["weight_sync/bytes"] == NUM_BYTES
    for engine in fleet.engines.values():
        assert engine.versions == [(None, False), (None, False), ("7", True)]
        assert engine.calls == ["begin", "init", ("update", 1), ("update", 2), ("update", 3), "end"]


def test_an_engine_with_the_plugin_gets_the_plan_once_and_then_one_call_per_update(sync, fleet):
    fleet.without_plugin = set()
    engine = fleet.engines[URLS[1]]
    policy = Policy()
    sync.push(policy.advance(), 1)
    (digest,) = engine.plans
    sync.push(policy.advance(), 2)
    assert holders(fleet, policy) == URLS
    assert engine.versions == [("1", True), ("2", True)]
    assert [bool(call.text) for call in engine.plan_calls] == [True, False]
    assert {call.digest for call in engine.plan_calls} == {digest}
    # An engine that joins again may have forgotten it.
    fleet.failed(URLS[1], "too slow")
    fleet.return_all()
    engine.plans.clear()
    sync.push(policy.advance(), 3)
    assert holders(fleet, policy) == URLS
    assert engine.plan_calls[-1].text


def test_engines_that_join_get_the_base_and_all_get_adapters(sync, fleet):
    fleet.without_plugin = set()
    sync._sync._adapter = {"r": 4}
    first, second, third = fleet.engines.values()
    policy = WithAdapters()
    num_bytes = 2 * 100 * 30
    base = [("update", 1), ("update", 2), ("update", 3), "end", "adapter"]
    adapters = ["begin", ("update", 1), "end"]
    assert sync.push(policy.advance(), 1)["weight_sync/bytes"] == NUM_BYTES + num_bytes
    assert first.calls == ["begin", "init", *base, *adapters]
    assert sync.push(policy.advance(), 2)["weight_sync/bytes"] == num_bytes
    for url in URLS[1:]:
        fleet.failed(url, "too slow")
    fleet.return_all()
    third.faults = {("update", 2): "die"}  # Of the base.
    for engine in (first, second, third):
        engine.calls.clear()
        engine.weights.pop("w")
    assert sync.push(policy.advance(), 3)["weight_sync/engines_failed"] == 1
    assert (first.calls, second.calls) == (adapters, ["begin", "destroy", "init", *base, *adapters])
    assert holders(fleet, policy) == URLS[:2]
    assert fleet.synced_versions == {URLS[0]: 3, URLS[1]: 3, URLS[2]: 2}
    fleet.return_all()
    assert sync.push_to_outdated(policy, 3)["weight_sync/bytes"] == NUM_BYTES + num_bytes
    assert holders(fleet, policy) == URLS


def test_engines_are_asleep_when_the_weights_come_and_awake_only_without_them(sync, fleet, monkeypatch):
    sync._sync._lends_memory = True
    monkeypatch.setattr(Pushing, "hold", lambda self, held: fleet.turns.append(held), raising=False)
    sync.push(Policy().advance(), 1)
    sync.push(Policy().advance(), 2)
    turn = ["sleep", "weights", "pause", "nothing", "resume"]
    assert fleet.turns == ["nothing", *turn, "weights", *turn]
    for url in URLS:
        fleet.failed(url, "too slow")
    fleet.return_all()
    fleet.turns.clear()
    for engine in fleet.engines.values():
        engine.faults = {("update", 1): "die"}
    with pytest.raises(FleetError, match="no engine took the weights"):
        sync.push(Policy().advance(), 3)
    assert fleet.turns == ["nothing", *turn] * 3


def test_an_engine_that_is_silent_is_found_and_the_others_are_updated(processes, fleet):
    """It is not waited for in every bucket, and no call of its own ends."""
    config = WeightSyncConfig(timeout_s=1.0)
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config))
    fleet.without_plugin = set()
    policy = Policy()
    for version, bucket in enumerate((1, 3, None), start=1):
        fleet.return_all()
        silent = fleet.engines[URLS[1]]
        silent.faults = {("update", bucket) if bucket else "acknowledge": "silence"}
        started = time.monotonic()
        sync.push(policy.advance(), version)
        assert set(holders(fleet, policy)) >= {URLS[0], URLS[2]}
        assert fleet.synced_versions == {URLS[0]: version, URLS[2]: version}
        assert time.monotonic() - started < 3 * config.timeout_s
        assert fleet.away == {URLS[1]: f"its update to version {version} failed: it has taken no weights for 1 s"}
    fleet.disconnect()
    sync.close()


def test_all_processes_of_an_engine_get_the_weights(sync, fleet):
    fleet.engines[URLS[1]] = engine = ScriptedEngine(URLS[1], TIMEOUT_S, tp_size=2)
    policy = Policy().advance()
    sync.push(policy, 7)
    assert holders(fleet, policy) == URLS
    engine.weights = engine.rank_weights[1]
    assert holders(fleet, policy) == URLS


AGREEMENT = Agreement(np.array([3, 1, 4, 1], np.int32), 0.01)
SCORES = np.array([-1.0, -2.0, -3.0], np.float32)


@pytest.fixture
def agreeing(processes, fleet):
    """A sync that compares; all engines agree."""
    config = WeightSyncConfig(timeout_s=TIMEOUT_S)
    for engine in fleet.engines.values():
        engine.scores = [-1.0, -2.0, -3.001]
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config), "run", AGREEMENT, SCORES)
    yield sync
    sync.close()


@pytest.mark.parametrize("scores", [[-1.0, -2.0, -3.1], [-1.0, None, -3.0], [-1.0, math.nan, -3.0]])
def test_an_engine_that_took_all_weights_but_scores_otherwise_is_not_used(agreeing, fleet, scores):
    fleet.engines[URLS[1]].scores = scores
    metrics = agreeing.push(Policy().advance(), 4)
    assert (metrics["weight_sync/engines"], metrics["weight_sync/engines_failed"]) == (2, 1)
    assert fleet.synced_versions == {URLS[0]: 4, URLS[2]: 4}
    (reason,) = fleet.disagreeing.values()
    assert "nats from the trainer's on average, which is not within rollout.engine_tolerance=0.01" in reason
    assert fleet.released == [URLS]


def test_only_engines_that_join_are_compared(agreeing, fleet):
    policy = Policy().advance()
    agreeing.push(policy, 4)
    agreeing.push(policy.advance(), 5)
    assert [engine.calls.count("score") for engine in fleet.engines.values()] == [1, 1, 1]
    fleet.outdated = {URLS[2]}
    agreeing.push_to_outdated(policy, 5)
    assert [engine.calls.count("score") for engine in fleet.engines.values()] == [1, 1, 2]
    assert agreeing.num_scored == 2, "once for each version at which engines join"
    assert fleet.engines[URLS[0]].versions[-1] == ("run:5", True)


@pytest.mark.parametrize("fault", ["die", "hang", "refuse", "other weights"])
def test_an_engine_that_cannot_be_compared_fails_the_update(agreeing, fleet, fault):
    if fault == "other weights":
        fleet.engines[URLS[0]].says_version = "another:4"
    else:
        fleet.engines[URLS[0]].faults["score"] = fault
    assert agreeing.push(Policy().advance(), 4)["weight_sync/engines"] == 2
    assert "did not score" in fleet.away[URLS[0]]
    assert not fleet.disagreeing


@pytest.fixture
def watched_groups(monkeypatch):
    """The trainer's groups with engines, in the order in which they are complete."""
    groups, works, found_completed = [], [], []

    def join_watched(*arguments):
        groups.append(Watched(join_group(*arguments), works, found_completed))
        return groups[-1]

    monkeypatch.setattr("dapo_mega.weight_sync.broadcast.join_group", join_watched)
    return groups


@pytest.mark.usefixtures("one_by_one")
def test_no_bucket_is_sent_before_all_of_the_one_before_has_come(processes, fleet, watched_groups):
    # Engines receive one chunk at a time.
    config = WeightSyncConfig(timeout_s=TIMEOUT_S, bucket_mib=1e-5)
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config))
    fleet.without_plugin = set()
    fleet.engines[URLS[1]].load_s = 0.2
    policy = Policy().advance()
    sync.push(policy, 1)
    assert holders(fleet, policy) == URLS
    found_completed = watched_groups[0].found_completed
    # The first chunks of three buckets, of two chunks for three engines each.
    assert (len(found_completed), found_completed[::6]) == (3 * 6, [True] * 3)
    sync.close()


@pytest.mark.parametrize("missing", range(3))
def test_chunks_have_come_only_when_all_have(missing):
    works = [SimpleNamespace(is_completed=lambda n=n: n != missing, wait=lambda: None) for n in range(3)]
    assert not _have_succeeded(works)
    assert _have_succeeded(works[:missing] + works[missing + 1 :])


def test_groups_last_from_update_to_update(sync, fleet):
    policy = Policy().advance()
    sync.push(policy, 1)
    sync.push(policy.advance(), 2)
    assert holders(fleet, policy) == URLS
    assert [engine.calls.count("init") for engine in fleet.engines.values()] == [1, 1, 1]


def test_an_engine_that_comes_back_leaves_its_old_group_for_a_new_one(sync, fleet):
    policy = Policy().advance()
    sync.push(policy, 1)
    (before,) = fleet.engines[URLS[1]].groups
    fleet.failed(URLS[1], "too slow")
    fleet.return_all()
    sync.push(policy.advance(), 2)
    (after,) = fleet.engines[URLS[1]].groups
    assert after != before
    assert holders(fleet, policy) == URLS


def test_the_group_of_an_engine_that_dies_is_given_up(sync, fleet, watched_groups):
    policy = Policy().advance()
    fleet.engines[URLS[1]].faults["update", 2] = "die"
    sync.push(policy, 1)
    assert set(holders(fleet, policy)) >= {URLS[0], URLS[2]}
    (dead, *others) = sorted(watched_groups, key=lambda group: group.num_broadcasts)
    assert dead.num_broadcasts in (1, 2)  # What was begun before its failure was known, or not.
    assert dead.num_aborts == 1
    assert [(group.num_broadcasts, group.num_aborts) for group in others] == [(3, 0), (3, 0)]


@pytest.mark.usefixtures("one_by_one")
def test_engines_get_chunks_only_if_all_of_them_have_the_plugin(sync, fleet):
    policy = Policy().advance()
    fleet.without_plugin = set()
    sync.push(policy, 1)
    assert holders(fleet, policy) == URLS
    assert {tuple(engine.chunk_lengths) for engine in fleet.engines.values()} == {((1, 1),) * 3}
    fleet.without_plugin = {URLS[1]}
    metrics = sync.push(policy.advance(), 2)
    assert holders(fleet, policy) == URLS
    assert metrics["weight_sync/bytes"] == NUM_BYTES
    assert {engine.chunk_lengths[-1] for engine in fleet.engines.values()} == {(2,)}


FULL, DELTA = 100 * 30 * 2, 30 * (4 + 2)


def test_between_full_updates_engines_get_only_what_has_changed(delta_sync, fleet):
    policy = SlowlyChanging()
    sizes, shares = [], []
    for version in range(1, 8):
        metrics = delta_sync.push(policy.advance(), version)
        sizes.append(metrics["weight_sync/bytes"])
        shares.append(metrics.get("weight_sync/changed_share"))
        assert holders(fleet, policy) == URLS
    assert shares == [None, 0.01, 0.01, None, 0.01, 0.01, None]
    assert [size > FULL for size in sizes] == [True, False, False, True, False, False, True]
    assert all(DELTA <= size < DELTA + 100 for size in sizes if size < FULL)


def test_changes_are_those_since_the_weights_that_were_sent_last(delta_sync, fleet):
    """Also after most values have changed, which are sent whole then; and changed back."""
    policy = SlowlyChanging()
    first = policy.tensors["w"].clone()
    for version, weights in enumerate((first, first + 1, first.index_fill(0, torch.tensor([3]), 2.0)), start=1):
        policy.tensors["w"] = weights
        delta_sync.push(policy, version)
        assert holders(fleet, policy) == URLS


@pytest.mark.parametrize("call", [("update", 1), "end"])
def test_an_engine_that_missed_a_change_gets_everything_first(delta_sync, fleet, call):
    policy = SlowlyChanging()
    delta_sync.push(policy.advance(), 1)
    fleet.engines[URLS[1]].faults[call] = "die"
    delta_sync.push(policy.advance(), 2)
    assert set(holders(fleet, policy)) >= {URLS[0], URLS[2]}
    fleet.return_all()
    fleet.engines[URLS[1]].weights.clear()
    assert delta_sync.push_to_outdated(policy, 2)["weight_sync/bytes"] > FULL
    assert holders(fleet, policy) == URLS
    assert delta_sync.push(policy.advance(), 3)["weight_sync/bytes"] < FULL
    assert holders(fleet, policy) == URLS


def test_after_an_update_in_sglangs_form_everything_is_sent_again(delta_sync, fleet):
    policy = SlowlyChanging()
    delta_sync.push(policy.advance(), 1)
    fleet.without_plugin = {URLS[0]}
    delta_sync.push(policy.advance(), 2)
    fleet.without_plugin = set()
    assert delta_sync.push(policy.advance(), 3)["weight_sync/bytes"] > FULL
    assert delta_sync.push(policy.advance(), 4)["weight_sync/bytes"] < FULL
    assert holders(fleet, policy) == URLS


@pytest.mark.parametrize("fault", ["die", "hang", "refuse"])
@pytest.mark.parametrize("call", ["begin", "init", ("update", 1), ("update", 2), ("update", 3), "end"])
def test_an_engine_that_fails_is_reported_and_the_others_are_updated(sync, fleet, call, fault):
    if (call, fault) == ("begin", "refuse"):
        fault = "refuse twice"  # One refusal may be a session of an earlier trainer.
    fleet.engines[URLS[1]].faults[call] = fault
    policy = Policy().advance()
    sync.push(policy, 1)
    assert fleet.synced_versions == {URLS[0]: 1, URLS[2]: 1}
    assert set(holders(fleet, policy)) >= {URLS[0], URLS[2]}
    assert list(fleet.away) == [URLS[1]]
    assert fleet.held == fleet.released == [URLS]
    # It comes back, in a group of its own, and the others keep theirs.
    fleet.return_all()
    metrics = sync.push_to_outdated(policy.advance(), 2)
    assert metrics["weight_sync/engines"] == 1
    assert fleet.held[1:] == fleet.released[1:] == [[URLS[1]]]
    sync.push(policy.advance(), 3)
    assert fleet.synced_versions == dict.fromkeys(URLS, 3)
    assert holders(fleet, policy) == URLS
    assert [fleet.engines[url].calls.count("init") for url in (URLS[0], URLS[2])] == [1, 1]


def test_an_engine_that_was_started_anew_joins_again(sync, fleet):
    policy = Policy().advance()
    sync.push(policy, 1)
    fleet.engines[URLS[0]].groups.clear()
    fleet.outdated.add(URLS[0])
    sync.push(policy.advance(), 2)
    assert holders(fleet, policy) == URLS
    assert not fleet.away


@pytest.mark.parametrize("says", ["", "refuse"])
def test_a_session_that_an_earlier_trainer_left_open_is_closed_first(sync, fleet, says):
    """Whatever the engine says of what came in it."""
    fleet.engines[URLS[2]].is_open = True
    fleet.engines[URLS[2]].refuses_what_came = bool(says)
    policy = Policy().advance()
    sync.push(policy, 1)
    assert holders(fleet, policy) == URLS


def test_a_push_that_no_engine_took_is_repeated_and_then_given_up(sync, fleet):
    policy = Policy().advance()

    def come_back(url, reason):
        fleet.outdated.add(url)

    fleet.failed = come_back
    for engine in fleet.engines.values():
        engine.faults["init"] = "die"
    metrics = sync.push(policy, 1)
    assert metrics["weight_sync/attempts"] >= 2
    assert holders(fleet, policy) == URLS
    for engine in fleet.engines.values():
        engine.is_dead = True
    with pytest.raises(FleetError, match="no engine took the weights of version 2 in 3 attempts"):
        sync.push(policy.advance(), 2)


def test_memory_of_this_machine_reaches_engines_bucket_by_bucket(processes, fleet):
    config = WeightSyncConfig(timeout_s=60)
    sync = Pushing(processes, fleet, config, SharedMemorySender(processes, config))
    fleet.engines = {LOCAL_URL: ScriptedEngine(LOCAL_URL, 60), "http://far.away": ScriptedEngine("http://far.away", 60)}
    fleet.outdated = set(fleet.engines)
    policy = Policy().advance()
    metrics = sync.push(policy, 4)
    assert holders(fleet, policy) == [LOCAL_URL]
    assert metrics["weight_sync/bytes"] == NUM_BYTES
    engine = fleet.engines[LOCAL_URL]
    assert engine.versions == [(None, False), (None, False), ("4", True)]
    assert engine.calls == ["begin", "tensor", "tensor", "tensor", "end"]
    assert "set weight_sync.transport to disk, or to distributed for engines on GPUs" in fleet.away["http://far.away"]


def test_a_shared_folder_holds_the_checkpoint_of_the_last_version_only(processes, fleet, tmp_path):
    policy = Policy()

    def export(path):
        path.mkdir(parents=True)
        save_file(policy.tensors, path / "model.safetensors")

    sync = Pushing(processes, fleet, WeightSyncConfig(), None, folder=tmp_path, export=export)
    fleet.engines[URLS[2]].faults["disk"] = "die"
    for version in (3, 4):
        sync.push(policy.advance(), version)
    assert [path.name for path in tmp_path.iterdir()] == ["version_00000004"]
    assert holders(fleet, policy) == URLS[:2]
    assert fleet.engines[URLS[0]].versions == [("3", True), ("4", True)]
    assert list(fleet.away) == [URLS[2]]


def test_engines_that_keep_requests_in_place_keep_their_cache(processes, fleet):
    config = WeightSyncConfig(timeout_s=TIMEOUT_S, in_flight="continue", pause="in_place")
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config))
    sync.push(Policy().advance(), 1)
    assert {flush for engine in fleet.engines.values() for _, flush in engine.versions} == {False}
    sync.close()
