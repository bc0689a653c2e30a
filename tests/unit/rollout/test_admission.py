"""How many prompts are submitted, by hand: N = 4 groups per step, rounds of 6 prompts, at most 3 rounds."""

from dataclasses import replace

import pytest

from dapo_mega.rollout.admission import Admission, Counts

RULE = Admission("synchronous", 4, 6, 3, max_staleness=1, num_steps=10)
NOTHING = Counts(asked=0, running=0, in_flight=0, held=0, kept_share=1.0)


def asks(schedule, first=6, version=5, max_staleness=1, **counts):
    rule = replace(RULE, schedule=schedule, max_staleness=max_staleness)
    return rule.while_a_step_waits(replace(NOTHING, **counts), first, version)


@pytest.mark.parametrize(("held", "expected"), [(0, 6), (1, 5), (2, 3), (3, 2), (4, 0), (7, 0)])
def test_the_first_round_is_for_what_is_not_held(held, expected):
    assert RULE.first_round(held) == expected


def test_a_synchronous_step_submits_whole_rounds_one_after_the_other():
    assert asks("synchronous", first=3) == 3
    assert asks("synchronous", asked=3, running=1, in_flight=1) == 0
    assert asks("synchronous", asked=3, in_flight=1) == 0, "complete, and not scored"
    assert asks("synchronous", asked=3) == 6
    assert asks("synchronous", asked=15) == 0, "of three rounds the last is begun"
    assert [RULE.num_rounds(asked) for asked in (0, 1, 6, 7, 18)] == [0, 1, 1, 2, 3]


def test_a_partial_step_keeps_its_first_round_in_flight_as_far_as_two_steps_can_use_it():
    assert asks("partial", asked=6, running=4) == 2
    assert asks("partial", asked=6, running=6) == 0
    assert asks("partial", held=5) == 3, "8 groups are two steps'"
    assert asks("partial", asked=16) == 2, "no more than three rounds"
    assert asks("partial", first=18, kept_share=0.25) == 13, "3.25 are kept, and three deviations more are 7.9"


def test_an_asynchronous_step_asks_for_as_many_steps_as_its_weights_may_be_used_in():
    assert asks("asynchronous", max_staleness=1, running=2) == 6
    assert asks("asynchronous", max_staleness=3) == 16
    assert asks("asynchronous", max_staleness=3, version=8) == 8, "steps 9 and 10 are the last"
    rule = replace(RULE, schedule="asynchronous", max_staleness=1)
    assert rule.while_a_step_trains(NOTHING, 6, engines_have_it=True) == 8
    assert rule.while_a_step_trains(NOTHING, 6, engines_have_it=False) == 4, "by weights of 5, for step 6 alone"
    assert rule.while_a_step_trains(NOTHING, 9, engines_have_it=True) == 4, "the last step"
