"""The timeline of a run with embedded engines, by a clock that the parts of the run turn."""

import pytest
import torch.distributed as dist

from dapo_mega.engines.embedded.fleet import EmbeddedFleet
from dapo_mega.metrics import StageTimers
from dapo_mega.metrics.timeline import Activity, Load, Span

from .scripted import ScriptedEngine
from .test_collector import collector, config, every_other


@pytest.fixture
def leaders():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class SlowEngine(ScriptedEngine):
    """Generates for five seconds, whatever is asked at once."""

    weight_version = 0

    def __init__(self, clock):
        super().__init__(every_other)
        self.clock = clock

    def generate(self, requests):
        self.clock.now += 5.0
        return [self.respond(request) for request in requests]

    def close(self):
        """As of `EmbeddedEngine`."""


def test_a_step_is_recorded_as_it_went(leaders):
    clock = Clock()

    def score(asked):
        clock.now += 1.0 if asked else 0.0

    activity = Activity(clock)
    timers = StageTimers(activity)
    fleet = EmbeddedFleet(SlowEngine(clock), clock=clock)
    subject = collector(fleet, config(), before_scoring=score, activity=activity)
    with timers.stage("rollout"):
        subject.collect(0)
    with timers.stage("update"):
        clock.now += 3.0
    with timers.stage("weight_sync"), activity.span("weights", "version 1"):
        clock.now += 0.5
    found = activity.pop(1, fleet.pop_loads())
    assert (found.step, found.start, found.end) == (1, 100.0, 109.5)
    assert found.spans == {
        "trainer": [Span("rollout", 100.0, 106.0), Span("update", 106.0, 109.0), Span("weight_sync", 109.0, 109.5)],
        "weights": [Span("version 1", 109.0, 109.5)],
    }
    # 6 groups of 4 responses.
    assert found.engines == {"embedded": [Load(100.0, 105.0, 24.0), Load(105.0, 109.5, 0.0)]}
    assert found.scoring == [Load(100.0, 105.0, 0.0), Load(105.0, 106.0, 24.0), Load(106.0, 109.5, 0.0)]
    with timers.stage("checkpoint"):
        clock.now += 2.0
    fleet.close()
    later = activity.pop(2, fleet.pop_loads())
    assert (later.start, later.spans) == (109.5, {"trainer": [Span("checkpoint", 109.5, 111.5)]})
    assert later.engines == {"embedded": [Load(109.5, 111.5, 0.0)]}
