"""The share of time in which engines have nothing to do, and what they have otherwise."""

import pytest

from dapo_mega.engines.sglang.engine_load import EngineLoad, load_metrics


def test_an_engine_is_idle_between_its_last_call_and_the_next():
    busy, idle = EngineLoad(now=0.0), EngineLoad(now=5.0)
    for num_calls, now in ((1, 2.0), (2, 3.0), (1, 7.0), (0, 8.0)):
        busy.change(num_calls, now)
    # 2 s at the start and 2 s at the end of 10 s; the other joined 5 s ago. One call for 2 s and two for 4 s.
    found = load_metrics([busy, idle], now=10.0)
    assert found == pytest.approx({"fleet/idle_share": (4 + 5) / (10 + 5), "fleet/requests_at_work": 10 / 6})
    busy.change(1, 11.0)
    found = load_metrics([busy, idle], now=14.0)
    assert found == pytest.approx({"fleet/idle_share": (1 + 4) / (4 + 4), "fleet/requests_at_work": 1}), (
        "counted from the last question on"
    )
    assert load_metrics([idle], now=15.0) == {"fleet/idle_share": 1.0}
    assert load_metrics([], now=20.0) == {}
