"""The asynchronous schedule: groups start and are scored beside training, none grows too old, none is lost or twice."""

import json
import threading
import time
from collections import Counter

import numpy as np
import pytest

from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.errors import InputError, StopRequested
from dapo_mega.rewards import ScoringFailure

from .scripted import ScriptedEngine
from .test_collector import StoppedEngine, collector, config, every_other, every_third, request_ids, scheduled

WAIT_S = 60


def asynchronous(max_staleness=1, num_steps=100, **algorithm):
    run = scheduled("asynchronous", algorithm={"max_generation_rounds": 9, "max_staleness": max_staleness, **algorithm})
    return run.model_copy(update={"num_steps": num_steps})


def answer(engine, number):
    """Finish the `number` oldest requests."""
    for request_id in sorted(engine.in_flight)[:number]:
        engine.finish(request_id)


def outstanding(subject):
    """Groups in flight, held, or scored and not yet counted."""
    values = subject.state()[0]
    return sum(len(values.get(name, [])) for name in ("in_flight", "buffer", "fed"))


def half_are_easy(prompt, request_id):
    """All responses to every other prompt are right, so that half of the groups carry no signal."""
    return prompt % 2 == 0 or request_id % 2 == 0


def test_groups_start_and_are_scored_beside_training():
    engine = ScriptedEngine(half_are_easy)
    subject = collector(engine, asynchronous())
    first, _ = subject.collect(0)
    submitted = len(engine.submitted)
    while engine.in_flight:
        answer(engine, 8)
        subject.settle()
    assert len(engine.submitted) > submitted, "new groups start in place of those without a signal"
    engine.version = 1
    assert len(subject._open) == 0
    second, metrics = subject.collect(1)
    assert {group.weight_version for group in second} == {0}, "the next step needs nothing else"
    assert metrics["buffer/token_share_age_1"] == 1
    assert metrics["groups/kept_share"] == pytest.approx(0.5, abs=0.2)
    assert not set(request_ids(first)) & set(request_ids(second))


@pytest.mark.parametrize("schedule", ["synchronous", "partial", "asynchronous"])
def test_groups_that_cannot_be_trained_on_are_asked_again_by_the_run_that_continues(schedule):
    run = {"synchronous": config, "partial": lambda: scheduled("partial"), "asynchronous": asynchronous}[schedule]()
    engine = ScriptedEngine(every_other)
    subject = collector(engine, run)
    first, _ = subject.collect(0)
    engine.version = 1
    expected, _ = subject.collect(1)
    if schedule == "asynchronous":
        answer(engine, 8)
        subject.settle()
    subject.give_back()
    resumed_engine = ScriptedEngine(every_other)
    resumed_engine.version = 1
    resumed = collector(resumed_engine, run)
    values, arrays = subject.state()
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    groups = resumed.collect(1)[0]
    held = [response["request_id"] for record in values["buffer"] for response in record["responses"]]
    assert set(request_ids(expected)) <= {*resumed_engine.submitted, *held}
    assert len(resumed_engine.submitted) == len(set(resumed_engine.submitted))
    assert not {*request_ids(groups), *resumed_engine.submitted} & set(request_ids(first))
    if schedule == "synchronous":
        assert request_ids(groups) == request_ids(expected)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_no_more_groups_are_started_than_steps_can_use_in_time(max_staleness):
    engine = ScriptedEngine(every_other)
    subject = collector(engine, asynchronous(max_staleness))
    for version in range(6):
        engine.version = version
        subject.collect(version)
        assert outstanding(subject) == 4 * max_staleness
        answer(engine, 10)


def test_the_last_steps_start_only_what_they_can_use():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, asynchronous(max_staleness=4, num_steps=3))
    left = []
    for version in range(3):
        engine.version = version
        subject.collect(version)
        left.append(outstanding(subject))
    assert left == [8, 4, 0]


def test_without_staleness_the_schedule_is_the_synchronous_one_group_for_group():
    def three_steps(run):
        engine = ScriptedEngine(every_third)
        subject = collector(engine, run)
        steps = []
        for version in range(3):
            engine.version = version
            steps.append(request_ids(subject.collect(version)[0]))
            assert not engine.in_flight
        return steps, subject.state()[0]

    strict = {"max_staleness": 0, "max_generation_rounds": 9}
    assert three_steps(asynchronous(0)) == three_steps(config(algorithm=strict))


@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_and_no_token_is_too_old_over_steps_and_restarts(max_staleness, seed):
    random = np.random.default_rng(seed)
    run = asynchronous(max_staleness)

    def new_engine():
        return ScriptedEngine(
            every_third,
            order=lambda request: request.seed * 2654435761 % 97,
            fails=lambda request: request.request_id % 31 == 5,
        )

    engine = new_engine()
    subject = collector(engine, run)
    ended: Counter[int] = Counter()

    def account(fates):
        for fate in fates:
            if fate.outcome != "surplus":
                members = fate.group.trajectories if fate.group else fate.unscored
                ended[members[0].id // 4 if members else f"no response {len(ended)}"] += 1

    for version in range(8):
        engine.version = version
        groups, metrics = subject.collect(version)
        account(subject.pop_fates())
        ages = [int(name.rpartition("_")[2]) for name in metrics if name.startswith("buffer/token_share_age_")]
        assert 0 <= min(ages) <= max(ages) <= max_staleness
        assert sum(metrics[f"buffer/token_share_age_{age}"] for age in ages) == pytest.approx(1)
        assert len(groups) == 4
        for _ in range(random.integers(4)):
            answer(engine, random.integers(20))
            subject.settle()
        if random.random() < 0.5:
            values, arrays = subject.state()
            engine = new_engine()
            subject = collector(engine, run)
            subject.load_state(json.loads(json.dumps(values)), arrays)
    waiting = {group.trajectories[0].id // 4 for group in subject.buffer.groups}
    values = subject.state()[0]
    waiting |= {record["request_ids"][0] // 4 for record in values["in_flight"]}
    waiting |= {record["responses"][0]["request_id"] // 4 for record in values.get("fed", [])}
    assert set(ended.values()) == {1}
    assert not waiting & set(ended)
    assert len(ended) + len(waiting) == subject.next_request_id // 4 > 32


def number_of(fate):
    """Of the group, in the order in which groups were asked for."""
    return fate.group.trajectories[0].id // 4


@pytest.mark.parametrize("error", [InputError("bad reward"), RuntimeError("a bug"), SystemExit(3)])
def test_what_ends_scoring_beside_training_is_raised_at_the_next_step_and_nothing_is_lost(error):
    def fail(asked):
        raise error

    engine = ScriptedEngine(every_other)
    subject = collector(engine, asynchronous())
    subject.collect(0)
    before = outstanding(subject)
    subject._scorer.before = fail
    answer(engine, 10**6)
    subject.settle()
    assert outstanding(subject) == before, "what could not be scored is still there"
    with pytest.raises(Exception, match=r"bad reward|a bug|SystemExit"):
        subject.collect(1)
    assert outstanding(subject) == before


def test_a_stop_while_a_step_waits_leaves_what_was_fed_for_the_step_that_continues():
    engine = StoppedEngine(half_are_easy, after=10**6)
    subject = collector(engine, asynchronous())
    subject.collect(0)
    fates = subject.pop_fates()
    done = {number_of(fate) for fate in fates if fate.outcome != "surplus"}
    surplus = {number_of(fate) for fate in fates} - done
    answer(engine, 8)
    subject.settle()
    before = outstanding(subject)
    engine.version, engine.left = 1, 5
    with pytest.raises(StopRequested):
        subject.collect(1)
    assert outstanding(subject) >= before
    values, arrays = subject.state()
    resumed = collector(ScriptedEngine(half_are_easy), asynchronous())
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    _, metrics = resumed.collect(1)
    fates = resumed.pop_fates()
    ended = {number_of(fate) for fate in fates}
    running = {record["request_ids"][0] // 4 for record in resumed.state()[0]["in_flight"]}
    assert len(ended) == len(fates)
    assert metrics["groups/offered"] == len(ended - surplus)
    assert sorted([*done, *ended, *running]) == list(range(resumed.next_request_id // 4))


def test_what_could_not_be_scored_beside_training_is_counted_once_or_scored_by_the_run_that_continues():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, asynchronous())
    subject.collect(0)
    waiting = sorted(engine.in_flight)
    answer(engine, 10**6)
    score = subject._scorer.score
    subject._scorer.score = lambda asked: [ScoringFailure("no judge") for _ in asked]
    subject.settle()
    subject._scorer.score = score
    assert not engine.in_flight, "they are still to be used"
    values, arrays = subject.state()
    engine.version = 1
    assert subject.collect(1)[1]["rollout/unscored_groups"] == 4
    assert [fate.outcome for fate in subject.pop_fates()].count("dropped") == 4
    resumed = collector(ScriptedEngine(every_other), asynchronous())
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    groups, metrics = resumed.collect(1)
    assert sorted(request_ids(groups)) == waiting
    assert metrics["rollout/unscored_groups"] == 0


def test_groups_that_engines_fail_are_replaced_beside_training():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, asynchronous())
    subject.collect(0)
    engine.fails = lambda request: True
    for request_id in sorted(engine.in_flight)[::4]:
        engine.finish(request_id)
    engine.fails = lambda request: False
    subject.settle()
    assert len(engine.in_flight) == 16
    engine.version = 1
    assert subject.collect(1)[1]["rollout/dropped_groups"] == 4


class EngineBeside(ScriptedEngine):
    """On an event loop in a thread of its own, as engines of a fleet. Answers so many requests at once."""

    def __init__(self, num_answered):
        super().__init__(every_other)
        self.num_answered = num_answered
        self.thread = LoopThread("engine")
        self.loop = self.thread.loop

    def run(self, work):
        return self.thread.run(work, WAIT_S)

    def settle(self):
        """Nothing waits for this."""

    def generate(self, request):
        generation = super().generate(request)
        if len(self.submitted) <= self.num_answered:
            self.loop.call_soon(self.finish, request.request_id)
        return generation

    def finish_oldest(self, number):
        async def answered():
            answer(self, number)

        self.run(answered())


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Slow:
    """Scoring that lasts until it is `let` go on."""

    def __init__(self):
        self.has_begun, self.let = threading.Event(), threading.Event()

    def __call__(self, asked):
        self.has_begun.set()
        assert self.let.wait(WAIT_S)


@pytest.fixture
def slowly():
    """A collector of whose groups for the next two steps the first four are scored, and the others are being scored
    while its step trains."""
    engine, slow = EngineBeside(16), Slow()
    subject = collector(engine, asynchronous(2))
    subject.collect(0)
    engine.finish_oldest(16)
    wait_until(lambda: len(subject._found) == 4)
    subject._scorer.before = slow
    engine.finish_oldest(16)
    assert slow.has_begun.wait(WAIT_S)
    yield engine, subject, slow
    slow.let.set()
    engine.thread.close()


def test_a_step_whose_groups_are_there_does_not_wait_for_the_scoring_of_others(slowly):
    engine, subject, slow = slowly
    assert outstanding(subject) == 8
    engine.version = 1
    groups, _ = subject.collect(1)
    assert len(groups) == 4
    assert not slow.let.is_set()
    # What is being scored is part of a checkpoint, and is not asked for again.
    values, arrays = subject.state()
    resumed = collector(ScriptedEngine(every_other), asynchronous(2))
    resumed.load_state(json.loads(json.dumps(values)), arrays)
    assert outstanding(resumed) == outstanding(subject) == 8
    slow.let.set()
    engine.version = 2
    used = [*request_ids(groups), *request_ids(subject.collect(2)[0])]
    assert used == sorted(set(used)), "in order, and none twice"
    assert request_ids(resumed.collect(2)[0]) == used[-4 * 4 :]


def test_a_step_that_lacks_groups_waits_for_their_scoring(slowly):
    engine, subject, slow = slowly
    for version in (1, 2):  # The second one needs what is being scored.
        engine.version = version
        if version == 2:
            threading.Timer(0.2, slow.let.set).start()
        assert len(subject.collect(version)[0]) == 4
    assert slow.let.is_set()


@pytest.mark.parametrize("schedule", ["partial", "asynchronous"])
def test_engines_get_other_groups_while_scoring_takes_long(schedule):
    engine, slow = EngineBeside(24), Slow()
    subject = collector(
        engine, asynchronous(1) if schedule == "asynchronous" else scheduled("partial"), before_scoring=slow
    )
    step = threading.Thread(target=subject.collect, args=(0,), daemon=True)
    step.start()
    wait_until(lambda: slow.has_begun.is_set() and engine.in_flight)
    slow.let.set()
    step.join(WAIT_S)
    assert not step.is_alive()
    engine.thread.close()


def test_when_engines_have_the_next_weights_what_a_further_step_can_use_starts_too():
    engine = ScriptedEngine(every_other)
    subject = collector(engine, asynchronous(1))
    subject.collect(0)
    subject.settle()
    assert outstanding(subject) == 4
    engine.version = 1
    subject.weights_arrived()
    assert outstanding(subject) == 8
    answer(engine, 10**6)
    for version in (1, 2):
        engine.version = version
        ages = [key for key in subject.collect(version)[1] if key.startswith("buffer/token_share_age")]
        assert set(ages) <= {"buffer/token_share_age_0", "buffer/token_share_age_1"}
