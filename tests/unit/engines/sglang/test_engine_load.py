"""The share of time in which engines have nothing to do, and what they have otherwise."""

import pytest

from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.engines.sglang.prefix_routing import EngineSlot, load_metrics
from dapo_mega.metrics.timeline import LoadHistory


def engine(now):
    slot = EngineSlot(EngineClient("http://engine", "key"), 0, LoadHistory(now))
    slot.pop_load(now)
    return slot


def test_an_engine_is_idle_between_its_last_call_and_the_next():
    busy, idle = engine(now=0.0), engine(now=5.0)
    for by, now in ((1, 2.0), (1, 3.0), (-1, 7.0), (-1, 8.0)):
        busy.change_calls(by, now)
    busy.history.pop(9.0)  # The timeline's own question changes nothing.
    # 2 s at the start and 2 s at the end of 10 s; the other joined 5 s ago. One call for 2 s and two for 4 s.
    found = load_metrics([busy, idle], now=10.0)
    assert found == pytest.approx({"fleet/idle_share": (4 + 5) / (10 + 5), "fleet/requests_at_work": 10 / 6})
    busy.change_calls(1, 11.0)
    found = load_metrics([busy, idle], now=14.0)
    assert found == pytest.approx({"fleet/idle_share": (1 + 4) / (4 + 4), "fleet/requests_at_work": 1}), (
        "counted from the last question on"
    )
    assert load_metrics([idle], now=15.0) == {"fleet/idle_share": 1.0}
    assert load_metrics([], now=20.0) == {}
