"""Simulated engines that die and come back, against what a pencil finds."""

import math

import pytest

from dapo_mega.errors import InputError
from dapo_mega.planning.step_time import DecodingSpeed
from dapo_mega.simulation.engines import FailureTimes
from dapo_mega.simulation.run import Costs, Workload, simulate

from .test_simulation import config


class Planned(FailureTimes):
    """The engines work for these seconds before they fail, in turn, and then for ever."""

    def __init__(self, works_s, num_engines, keeps_parts=True):
        self._works_s = iter(works_s)
        super().__init__(num_engines, 1.0, restart_s=5.0, weights_s=2.0, keeps_parts=keeps_parts)

    def until_failure(self):
        return next(self._works_s, math.inf)


def test_what_a_dead_engine_decoded_is_decoded_again_after_its_return(asked):
    simulation = asked([4, 10], Planned([9.0], 1))
    engines = simulation.engines
    # Three tokens of each are lost at 9 s; the engine answers at 14 s and has weights at 16 s.
    assert simulation.ends(2) == [(0, 16 + 12.0), (1, 28 + 12.0)]
    assert (engines.num_failures, engines.num_lost) == (1, 6)
    assert engines.away_share() == pytest.approx(5 / 40)
    assert engines.idle_share() == pytest.approx(2 / 40)


def test_responses_of_a_dead_engine_go_on_at_the_others_before_those_that_wait(asked):
    # Each has an engine, whose token takes 2 s; at 5 s the first has lost 2 tokens, and a token of two takes 3 s.
    simulation = asked([4, 10, 1], Planned([5.0], 2), num_engines=2)
    simulation.generations[2].cancel()
    assert simulation.ends(2) == [(0, 5 + 12.0), (1, 17 + 7.0)]
    full = asked([4, 10, 9, 9, 1], Planned([2.5], 2), num_engines=2)
    # The second engine has no place; the first has weights again at 9.5 s, and the fifth response still waits.
    assert full.ends(3) == [(0, 9.5 + 12.0), (4, 21.5 + 3.0), (3, 27.0)]


@pytest.mark.parametrize(("keeps_parts", "num_lost", "end"), [(True, 2, 119 + 3), (False, 8, 119 + 12)])
def test_parts_from_before_the_last_update_are_kept_where_calls_end_with_it(asked, keeps_parts, num_lost, end):
    simulation = asked([4, 10], Planned([112.0], 1, keeps_parts))
    simulation.train(9.0)
    engines = simulation.engines
    engines.update(version=1, seconds=100.0)
    assert simulation.generations[0].oldest_version() == 0
    answer = simulation.next()
    assert (engines.clock, engines.num_lost) == (end, num_lost)
    assert answer.version_spans == (((0, 3), (1, 4)) if keeps_parts else ((1, 4),))


def test_engines_that_die_before_any_response_ends_are_refused(asked):
    simulation = asked([10], Planned([5.0] * 1000, 1))
    with pytest.raises(InputError, match=r"each engine failed 200 times and no response ended; give a lower --engine-"):
        simulation.next()


def test_an_engine_that_returns_during_training_waits_for_the_next_update(asked):
    simulation = asked([4, 10], Planned([9.0, 30.0], 1))
    engines = simulation.engines
    simulation.train(50.0)  # Back at 14 s, it dies again at 44 s and is back at 49 s.
    assert (engines.num_failures, engines.num_lost) == (2, 6)
    engines.update(version=1, seconds=10.0)
    assert simulation.ends(1) == [(0, 60 + 12.0)]
    assert engines.away_share() == pytest.approx((50 - 9) / 72)


def test_a_run_with_failures_is_slower_by_about_what_they_take():
    workload = Workload(mean_length=500, spread=0.9, kept_share=0.5)
    speed = DecodingSpeed(0.01, 0.00005, 64)
    without, found = (
        simulate(config("asynchronous", 2), workload, Costs(5.0, 1.0, 8, speed, per_hour, restart_s=5.0), num_steps=8)
        for per_hour in (0.0, 80.0)
    )
    assert without.num_failures == without.away_share == without.lost_share == 0
    assert found.num_failures > 10
    # 5 s of every 45 + 5 s, and the wait for the trainer to send weights.
    assert 0.1 < found.away_share < 0.25
    assert 0 < found.lost_share < 0.2
    assert 0.75 < found.steps_per_hour / without.steps_per_hour < 1
