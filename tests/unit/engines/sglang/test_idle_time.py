"""The share of time in which engines have nothing to do."""

import pytest

from dapo_mega.engines.sglang.idle_time import IdleTime, idle_share


def test_an_engine_is_idle_between_its_last_call_and_the_next():
    busy, idle = IdleTime(now=0.0), IdleTime(now=5.0)
    busy.begin_work(2.0)
    busy.begin_work(3.0)
    busy.end_work(8.0)
    # 2 s at the start and 2 s at the end of 10 s; the other joined 5 s ago.
    assert idle_share([busy, idle], now=10.0) == pytest.approx((4 + 5) / (10 + 5))
    busy.begin_work(11.0)
    assert idle_share([busy, idle], now=14.0) == pytest.approx((1 + 4) / (4 + 4)), "counted from the last question on"
    assert idle_share([], now=20.0) is None
