"""An engine that holds up the others is found, and none that only waits for another one."""

import math
import random

import pytest
import torch
import torch.distributed as dist

from dapo_mega.engines.sglang.weight_protocol import PlannedBucket, UpdatePlan, steps_to
from dapo_mega.types import WeightSpec
from dapo_mega.weight_sync.progress import LateEngines, Report, UpdateNews

URLS = ["a", "b", "c"]


@pytest.fixture
def store():
    return dist.HashStore()


def test_every_reader_finds_the_engines_that_failed_in_this_update(store):
    added, first, second = (UpdateNews(store, 3) for _ in range(3))
    added.add_failed("a")
    first.read_failed()
    added.add_failed("b")
    first.read_failed()
    second.read_failed()
    assert first.failed == second.failed == ["a", "b"]
    of_next = UpdateNews(store, 4)
    of_next.read_failed()
    assert of_next.failed == []


def test_reports_are_the_last_ones_of_this_update(store):
    now = UpdateNews(store, 7)
    now.report(0, 2, ["a"])
    now.report(0, 2)
    UpdateNews(store, 6).report(1, 9, ["b"])
    now.report(3, 4, ["c"])
    assert now.reports([0, 1, 2, 3]) == [(2, [], []), (-1, (), ()), (-1, (), ()), (4, ["c"], [])]


def found(late, *times_and_reports):
    """What is late at each time."""
    return [
        "".join(sorted(late.find([Report(*report) for report in reports], URLS, time)))
        for time, *reports in times_and_reports
    ]


def test_an_engine_is_late_if_nothing_changes_for_the_time_limit():
    waiting = [(0, ["b"]), (0, [])]
    assert found(LateEngines(4, 10.0), (0, *waiting), (10, *waiting), (11, *waiting)) == ["", "", "b"]
    # It goes on with the other sender, which is a sign of life.
    other = [(0, []), (0, ["b"])]
    assert found(LateEngines(4, 10.0), (0, *waiting), (9, *other), (18, *waiting), (19, *waiting)) == [""] * 4


def test_an_engine_that_takes_a_bucket_now_and_then_may_not_do_so_for_ever():
    turns = [[(0, ["b"]), (0, [])], [(0, []), (0, ["b"])]]
    times = [(9 * number, *turns[number % 2]) for number in range(4)]
    assert found(LateEngines(4, 10.0), *times) == ["", "", "", "b"]


def test_nobody_is_late_who_waits_for_a_sender():
    """The second sender waits for b in the first round, and so a and c wait for the second sender in the next one."""
    reports = [(1, URLS), (0, ["b"]), (1, ["a", "c"])]
    assert found(LateEngines(4, 10.0), (0, *reports), (11, *reports)) == ["", "b"]
    # Nor while a sender gathers, or before it has begun.
    for round_ in (0, -1):
        reports = [(1, URLS), (round_, [])]
        assert found(LateEngines(4, 10.0), (0, *reports), (11, *reports), (99, *reports)) == [""] * 3


def test_the_clock_starts_anew_with_every_round():
    late = LateEngines(4, 10.0)
    assert found(late, (0, (0, ["a"])), (9, (1, ["a"])), (18, (1, ["a"])), (20, (1, ["a"]))) == ["", "", "", "a"]


def test_an_engine_that_has_everything_must_answer():
    sent = [(3, []), (3, [])]
    assert found(LateEngines(4, 10.0), (0, *sent), (10, *sent), (11, *sent)) == ["", "", "abc"]
    assert LateEngines(4, 10.0).find([Report(*report) for report in sent], [], 0.0) == set()


class Engine:
    """Takes the buckets of a plan in its turn, one in each step if their senders are there; some never go on."""

    def __init__(self, plan, turn, stops_after):
        self.order = [(number, b) for number, r in enumerate(plan.rounds) for b in plan.in_turn(turn) if b in r]
        self.stops_after = stops_after
        self.num_taken = 0


@pytest.mark.parametrize("seed", range(40))
def test_whatever_stops_it_is_found_and_all_others_get_everything(seed):
    chance = random.Random(seed)
    num_senders, num_rounds, num_engines = chance.randint(1, 5), chance.randint(1, 4), chance.randint(1, 7)
    plan = UpdatePlan(
        num_senders,
        0,
        tuple(
            tuple(bucket(sender, number) for sender in range(num_senders) if chance.random() < 0.8 or sender == 0)
            for number in range(num_rounds)
        ),
    )
    num_buckets = sum(map(len, plan.rounds))
    stopping = set(chance.sample(range(num_engines), chance.randint(0, num_engines)))
    engines = {
        f"e{turn}": Engine(plan, turn, chance.randrange(num_buckets + 1) if turn in stopping else None)
        for turn in range(num_engines)
    }
    expected = {url for url, engine in engines.items() if engine.stops_after is not None}
    assert simulated(plan, engines, chance) == expected
    assert all(engine.num_taken == num_buckets for url, engine in engines.items() if url not in expected)


def bucket(sender, number):
    return PlannedBucket(sender, (WeightSpec(f"{sender}/{number}", torch.float32, (1,)),), (1,))


def simulated(plan, engines, chance):
    """Who was found late, when senders, engines and the search for who is late go on in steps; the time limit is more
    steps than an innocent engine needs. An engine has answered when it has everything."""
    late = LateEngines(len(plan.rounds), 10.0 * len(engines) * plan.num_senders)
    at = [0] * plan.num_senders  # The round of each sender.
    num_at_once = math.ceil(len(engines) / plan.num_senders)
    awaited, queued = {}, {}  # (round, sender) -> the engines that lack its bucket.
    failed = set()
    for now in range(10**5):
        for sender in range(plan.num_senders):
            if at[sender] == len(plan.rounds) or at[sender] > min(at) + 1:
                continue  # Gathering goes one round ahead.
            key = at[sender], sender
            if key not in queued:
                has_bucket = any(b.sender == sender for b in plan.rounds[at[sender]])
                in_turn = sorted(engines, key=lambda url: steps_to(int(url[1:]), plan.num_senders, sender))
                awaited[key], queued[key] = [], in_turn if has_bucket else []
            awaited[key] = [url for url in awaited[key] if url not in failed]
            queued[key] = [url for url in queued[key] if url not in failed]
            while queued[key] and len(awaited[key]) < num_at_once:
                awaited[key].append(queued[key].pop(0))
            at[sender] += not awaited[key]
        for url, engine in engines.items():
            if url in failed or engine.num_taken in (engine.stops_after, len(engine.order)) or chance.random() < 0.5:
                continue
            number, b = engine.order[engine.num_taken]
            if url in awaited.get((number, b.sender), ()):
                awaited[number, b.sender].remove(url)
                engine.num_taken += 1
        reports = [
            Report(number, awaited.get((number, s), ()), queued.get((number, s), ()))
            if number < len(plan.rounds)
            else Report(number - 1)
            for s, number in enumerate(at)
        ]
        unanswered = [
            url
            for url, e in engines.items()
            if url not in failed and (e.stops_after is not None or e.num_taken < len(e.order))
        ]
        if not unanswered:
            return failed
        failed |= late.find(reports, unanswered, float(now))
    raise AssertionError("the update never ends")
