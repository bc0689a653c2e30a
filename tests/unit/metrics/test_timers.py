import time

import pytest

from dapo_mega.metrics import StageTimers
from dapo_mega.metrics.timeline import Activity


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stages_accumulate_and_the_step_covers_the_time_between():
    clock = Clock()
    timers = StageTimers(Activity(clock))
    for seconds in (2.0, 3.0):
        with timers.stage("rollout"):
            clock.now += seconds
        clock.now += 0.5
    with timers.stage("update"):
        clock.now += 7.0
    assert timers.summary() == {"time/rollout_s": 5.0, "time/update_s": 7.0, "time/step_s": 13.0}


def test_summary_starts_a_new_step():
    clock = Clock()
    timers = StageTimers(Activity(clock))
    with timers.stage("rollout"):
        clock.now += 2.0
    timers.summary()
    clock.now += 4.0
    assert timers.summary() == {"time/step_s": 4.0}


def test_a_stage_that_fails_is_counted_and_can_be_entered_again():
    clock = Clock()
    timers = StageTimers(Activity(clock))

    def fail() -> None:
        with timers.stage("rollout"):
            clock.now += 2.0
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        fail()
    with timers.stage("rollout"):
        clock.now += 1.0
    assert timers.summary()["time/rollout_s"] == 3.0


def test_nested_stages_both_count():
    clock = Clock()
    timers = StageTimers(Activity(clock))
    with timers.stage("rollout"):
        clock.now += 1.0
        with timers.stage("rewards"):
            clock.now += 2.0
    assert timers.summary() == {"time/rewards_s": 2.0, "time/rollout_s": 3.0, "time/step_s": 3.0}


def test_an_open_stage_counts_in_the_step_in_which_it_closes():
    clock = Clock()
    timers = StageTimers(Activity(clock))
    with timers.stage("rollout"):
        clock.now += 1.0
        assert timers.summary() == {"time/step_s": 1.0}
        clock.now += 2.0
    assert timers.summary() == {"time/rollout_s": 3.0, "time/step_s": 2.0}


def test_the_same_stage_within_itself_is_refused():
    timers = StageTimers()
    with timers.stage("rollout"), pytest.raises(ValueError, match="already open"), timers.stage("rollout"):
        pass
    with timers.stage("rollout"):
        pass


@pytest.mark.parametrize("name", ["step", "Rollout", "a/b", "", "1st"])
def test_a_malformed_or_taken_stage_name_is_refused(name):
    with pytest.raises(ValueError, match="stage name"), StageTimers().stage(name):
        pass


def test_the_default_clock_measures_seconds():
    timers = StageTimers()
    with timers.stage("rollout"):
        time.sleep(0.05)
    assert 0.05 <= timers.summary()["time/rollout_s"] < 5.0
