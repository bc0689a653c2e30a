"""Which groups partial rollouts use and drop, against a model by hand of engines that answer in any order."""

import json
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dapo_mega.rewards.built_in import CoinReward
from tests.unit.rollout.test_collector import ScriptedEngine, collector, every_other, partial

N, SIZE = 8, 4


def run_of(generation_groups, max_staleness=1, **algorithm):
    batch = {"groups_per_step": N, "group_size": SIZE, "generation_groups": generation_groups, "mini_batch_groups": N}
    algorithm = {"max_staleness": max_staleness, "max_generation_rounds": 6, "dynamic_sampling": False, **algorithm}
    return partial(batch=batch, algorithm=algorithm, reward={"source": "random", "overlong_cache_tokens": 4})


class Engines(ScriptedEngine):
    """Generates `capacity` requests at a time, in the order of their submission, and finishes them in an order of its
    own, also between steps. Knows of every request when it was begun, answered or cancelled."""

    def __init__(self, is_right, rng, order="random", capacity=10**6):
        super().__init__(is_right)
        self.rng, self.finishes, self.capacity = rng, order, capacity
        self.queue, self.begun, self.answered, self.cancelled_at = deque(), {}, {}, {}

    def generate(self, request):
        generation = super().generate(request)
        self.queue.append(request.request_id)
        self.most_groups = max(self.most_groups, len({request_id // SIZE for request_id in self.in_flight}))
        self._begin()
        return generation

    def _begin(self):
        while self.queue and len(self.in_flight) - len(self.queue) < self.capacity:
            request_id = self.queue.popleft()
            self.begun[request_id] = self.version
            self.in_flight[request_id] = (self.in_flight[request_id][0], self.version)

    def running(self):
        return [i for i in self.in_flight if i in self.begun]

    def oldest_version(self, request_id):
        return self.begun.get(request_id, self.version)

    def _finish_one(self):
        running = sorted(self.running())
        chosen = {"oldest": running[0], "newest": running[-1], "random": self.rng.choice(running)}[self.finishes]
        self.answered[chosen] = self.version
        self.finish(chosen)
        self._begin()

    def step(self):
        """At times more than one answer is there when the first one is waited for."""
        if not self.in_flight:
            return False
        for _ in range(min(self.rng.choice([1, 1, 5]), len(self.running()))):
            self._finish_one()
        return True

    def go_on(self, share):
        """Between two steps a share of all responses comes to its end; `version` is the next step's already."""
        for _ in range(round(share * len(self.in_flight))):
            if self.running():
                self._finish_one()

    def cancel(self, request_id):
        self.cancelled_at[request_id] = self.version
        if request_id in self.queue:
            self.queue.remove(request_id)
        super().cancel(request_id)
        self._begin()


@dataclass
class Account:
    """What the metrics of some steps say, and the groups trained on, by the number of their first request."""

    trained: dict[int, int] = field(default_factory=dict)
    offered: float = 0.0
    stale: float = 0.0
    expired: float = 0.0
    in_flight: float = 0.0


def simulate(subject, engines, shares, account):
    for share in shares:
        version = engines.version
        groups, metrics = subject.collect(version)
        assert all(version - group.weight_version <= subject._config.algorithm.max_staleness for group in groups)
        account.trained.update((group.trajectories[0].id // SIZE, version) for group in groups)
        account.offered += metrics["groups/offered"]
        account.stale += metrics["buffer/stale_dropped"]
        account.expired += metrics["rollout/groups_expired_in_flight"]
        account.in_flight = metrics["rollout/groups_in_flight"]
        engines.version += 1
        engines.go_on(share)


def model_by_hand(engines, subject):
    """Of all groups asked: those complete while fresh enough, complete too late, and given up, by number."""
    limit = subject._config.algorithm.max_staleness
    last_read = engines.version - 1
    in_time, too_late, given_up = set(), set(), set()
    for number in range(subject.next_request_id // SIZE):
        ids = range(number * SIZE, (number + 1) * SIZE)
        if any(i in engines.cancelled_at for i in ids):
            given_up.add(number)
            # A response under way, or one that had come, was too old for the step.
            oldest = min(engines.begun[i] for i in ids if i in engines.begun)
            at = min(engines.cancelled_at[i] for i in ids if i in engines.cancelled_at)
            assert at - oldest > limit
        elif all(i in engines.answered and engines.answered[i] <= last_read for i in ids):
            at = max(engines.answered[i] for i in ids)
            oldest = min(engines.begun[i] for i in ids)
            (in_time if at - oldest <= limit else too_late).add(number)
    return in_time, too_late, given_up


ORDERS = st.sampled_from(["oldest", "newest", "random"])
SHARES = st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=3, max_size=12)


@settings(max_examples=40, phases=[Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 2**16),
    order=ORDERS,
    generation_groups=st.sampled_from([8, 12, 24]),
    max_staleness=st.integers(1, 3),
    capacity=st.sampled_from([12, 10**6]),
    shares=SHARES,
)
def test_no_group_that_is_complete_and_fresh_enough_is_ever_dropped(
    seed, order, generation_groups, max_staleness, capacity, shares
):
    engines = Engines(every_other, random.Random(seed), order, capacity)
    subject = collector(engines, run_of(generation_groups, max_staleness))
    account = Account()
    simulate(subject, engines, shares, account)
    in_time, too_late, given_up = model_by_hand(engines, subject)
    held = {group.trajectories[0].id // SIZE for group in subject.buffer.groups}
    assert account.trained.keys() | held == in_time
    assert not account.trained.keys() & held
    assert account.stale == len(too_late)
    assert account.expired == len(given_up)
    assert account.offered + account.expired + account.in_flight == subject.next_request_id // SIZE
    assert len(held) + account.in_flight <= N


def after_a_step(generation_groups=12):
    """A run whose first step used the first groups asked and left the next ones in flight; new weights are there."""
    engine = ScriptedEngine(every_other)
    subject = collector(engine, run_of(generation_groups))
    subject.collect(0)
    assert sorted(engine.in_flight) == list(range(N * SIZE, 2 * N * SIZE))
    engine.version = 1
    return engine, subject


@pytest.mark.parametrize("generation_groups", [12, 24])
def test_what_has_arrived_is_read_before_new_prompts_are_asked(generation_groups):
    engine, subject = after_a_step(generation_groups)
    for request_id in list(engine.in_flight)[:-SIZE]:
        engine.finish(request_id)
    asked = len(engine.submitted)
    groups, metrics = subject.collect(1)
    # One of eight groups is missing: an eighth of a round's prompts is wanted, and one group is in flight already.
    assert len(engine.submitted) - asked == (-(-generation_groups // N) - 1) * SIZE
    assert [group.weight_version for group in groups] == [0] * N
    assert (metrics["buffer/stale_dropped"], metrics["rollout/groups_expired_in_flight"]) == (0, 0)


def test_a_step_whose_groups_have_all_arrived_asks_nothing():
    engine, subject = after_a_step()
    for request_id in list(engine.in_flight):
        engine.finish(request_id)
    asked = len(engine.submitted)
    _, metrics = subject.collect(1)
    assert len(engine.submitted) == asked
    assert metrics["rollout/generation_rounds"] == 0


@pytest.mark.parametrize("generation_groups", [12, 24])
def test_engines_are_kept_as_busy_as_asked_when_most_groups_are_of_no_use(generation_groups, monkeypatch):
    engines = Engines(every_other, random.Random(0))
    subject = collector(engines, run_of(generation_groups, dynamic_sampling=True))
    # In two of three groups all responses are wrong.
    monkeypatch.setattr(CoinReward, "is_heads", lambda _, number: number // SIZE % 3 == 0 and number % 2 == 0)
    account = Account()
    simulate(subject, engines, [0.3] * 3, account)
    engines.most_groups = 0
    simulate(subject, engines, [0.3] * 9, account)
    assert engines.most_groups == generation_groups
    in_time, _, _ = model_by_hand(engines, subject)
    held = {group.trajectories[0].id // SIZE for group in subject.buffer.groups}
    assert account.trained.keys() | held == {number for number in in_time if number % 3 == 0}


@pytest.mark.parametrize("saved_before", [False, True], ids=["saved now", "saved before there were trajectories"])
def test_a_restart_loses_nothing_that_had_arrived(saved_before):
    """The file is the state at the same moment as commit 1d49d90 saved it."""
    engine, subject = after_a_step()
    had_arrived = [*range(8 * SIZE, 9 * SIZE), 9 * SIZE]
    for request_id in had_arrived:
        engine.finish(request_id)
    values, arrays = subject.state()
    again = ScriptedEngine(every_other)
    again.version = 1
    resumed = collector(again, run_of(12))
    if saved_before:
        with np.load(Path(__file__).parent / "before_trajectories.npz") as file:
            resumed.load_state(json.loads(str(file["values"])), file)
    else:
        resumed.load_state(json.loads(json.dumps(values)), arrays)
        assert json.dumps(resumed.state()[0]) == json.dumps(values)
    groups, metrics = resumed.collect(1)
    assert [group.trajectories[0].id // SIZE for group in groups] == list(range(8, 16))
    assert not set(had_arrived) & set(again.submitted)
    for member in (member for group in groups for member in group.trajectories):
        assert len(member.token_ids) == 3 + member.id % 14
        drawn = np.random.default_rng(member.id).random(len(member.token_ids), dtype=np.float32)
        assert np.array_equal(member.logprobs, -drawn)
    # What was under way is made anew with the current weights, so it is as young as they are.
    assert [group.weight_version for group in groups] == [0, 0] + [1] * 6
    assert metrics["rollout/groups_expired_in_flight"] == 0


def test_after_a_restart_a_group_is_as_old_as_the_responses_it_has():
    engine, subject = after_a_step()
    engine.finish(9 * SIZE)
    values, arrays = subject.state()
    for record in values["in_flight"]:
        record["oldest_version"] = 0  # Checkpoints of earlier versions hold it.
    again = ScriptedEngine(every_other)
    resumed = collector(again, run_of(12))
    resumed.load_state(values, arrays)
    again.version = 2
    groups, metrics = resumed.collect(2)
    assert [group.trajectories[0].id // SIZE for group in groups] == [8, *range(10, 17)]
    assert metrics["rollout/groups_expired_in_flight"] == 1


def test_a_group_that_fails_during_a_checkpoint_is_never_lost():
    engine, subject = after_a_step()
    engine.fails = lambda request: request.request_id == 8 * SIZE
    engine.finish(8 * SIZE)
    values, arrays = subject.state()
    assert len(values["in_flight"]) == N
    again = ScriptedEngine(every_other)
    resumed = collector(again, run_of(12))
    resumed.load_state(values, arrays)
    assert resumed.collect(1)[1]["rollout/dropped_groups"] == 0
    assert 8 * SIZE in again.submitted
    assert subject.collect(1)[1]["rollout/dropped_groups"] == 1


@settings(max_examples=25, phases=[Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 2**16),
    order=ORDERS,
    generation_groups=st.sampled_from([8, 12, 24]),
    max_staleness=st.integers(1, 3),
    shares=SHARES,
    killed_after=st.sets(st.integers(0, 11)),
)
def test_after_a_kill_no_token_that_is_trained_on_is_older_than_allowed(
    seed, order, generation_groups, max_staleness, shares, killed_after
):
    rng, config = random.Random(seed), run_of(generation_groups, max_staleness)
    engines = Engines(every_other, rng, order)
    subject = collector(engines, config)
    for step, share in enumerate(shares):
        groups, _ = subject.collect(step)
        members = [member for group in groups for member in group.trajectories]
        versions = {v for r in members for v in (r.weight_version, *(version for version, _ in r.version_spans))}
        assert min(versions) >= step - max_staleness
        engines.version += 1
        engines.go_on(share)
        if step in killed_after:
            values, arrays = subject.state()
            engines = Engines(every_other, rng, order)
            engines.version = step + 1
            subject = collector(engines, config)
            subject.load_state(json.loads(json.dumps(values)), arrays)
