"""The time of groups from their submission to the step that uses them, against what the engine saw."""

import json

import numpy as np
import pytest

from dapo_mega.metrics.timeline import Activity

from .test_collector import ScriptedEngine, collector, every_third, scheduled

DOWNTIME_S = 1000.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class TimedEngine(ScriptedEngine):
    """Every answer that is waited for takes a second; `started` has the times of the first submissions."""

    def __init__(self, clock, started):
        super().__init__(every_third, order=lambda request: request.seed * 2654435761 % 97)
        self.clock, self.started = clock, started

    def generate(self, request):
        self.started.setdefault(request.request_id, self.clock.now)
        return super().generate(request)

    def step(self):
        self.clock.now += 1.0
        return super().step()


@pytest.mark.parametrize("schedule", ["synchronous", "partial", "asynchronous"])
def test_groups_are_timed_from_submission_to_use_over_steps_and_restarts(schedule):
    run = scheduled(schedule, algorithm={"max_generation_rounds": 9, "max_staleness": 2})
    run = run.model_copy(update={"num_steps": 100})
    clock = Clock()
    engine = TimedEngine(clock, {})
    subject = collector(engine, run, activity=Activity(clock))
    carried_over = set()
    num_carried_over = 0
    for version in range(6):
        engine.version = version
        groups, metrics = subject.collect(version)
        first_ids = [group.trajectories[0].id for group in groups]
        expected = [clock.now - engine.started[first] for first in first_ids]
        assert metrics["time/group_latency_mean_s"] == pytest.approx(np.mean(expected))
        assert metrics["time/group_latency_max_s"] == pytest.approx(max(expected))
        num_carried_over += len(carried_over & set(first_ids))
        clock.now += 50.0  # Training.
        if version % 2:
            values, arrays = subject.state()
            carried_over = set(map(int, values["group_seconds"]))
            clock.now += DOWNTIME_S
            engine = TimedEngine(clock, {i: started + DOWNTIME_S for i, started in engine.started.items()})
            subject = collector(engine, run, activity=Activity(clock))
            subject.load_state(json.loads(json.dumps(values)), arrays)
    assert num_carried_over > 0
    held = [group.trajectories[0].id for group in subject.buffer.groups]
    values = subject.state()[0]
    in_flight = [record["request_ids"][0] for record in values["in_flight"]]
    fed = [record["responses"][0]["request_id"] for record in values.get("fed", [])]
    assert set(values["group_seconds"]) == {str(first) for first in (*held, *in_flight, *fed)}, (
        "nothing is kept for long"
    )
