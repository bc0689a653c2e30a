"""The error that a drift between engine and trainer makes in the gradient, by hand for a vocabulary of two tokens."""

import math
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "benchmarks"


@pytest.fixture
def gradient_error(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from benchmark_fp8_drift import gradient_error

    yield gradient_error
    for name in ("benchmark_fp8_drift", "benchmark_workload"):
        sys.modules.pop(name, None)


def test_the_cap_takes_away_the_error_of_all_tokens_that_it_does_not_reach(gradient_error):
    # With two tokens p A sums to 0 and the gradient of q w A is (w_0 q_0 A_0 p_1 - w_1 q_1 A_1 p_0) (1, -1).
    p, q = torch.tensor([[0.6, 0.4]]), torch.tensor([[0.9, 0.1]])
    own, engine = p.log(), q.log()
    assert gradient_error(own, own, None) == pytest.approx(0, abs=1e-6)
    assert gradient_error(own, engine, math.inf) == pytest.approx(0, abs=1e-6)
    # A = (0.4 d, -0.6 d): p A = 0.24 d; without weights 0.9 0.4 0.4 + 0.1 0.6 0.6 = 0.18 in place of 0.24.
    assert gradient_error(own, engine, None) == pytest.approx(0.06 / 0.24, rel=1e-5)
    # w = (2/3, 4), cut to 2: 0.6 0.4 0.4 + 0.2 0.6 0.6 = 0.168.
    assert gradient_error(own, engine, 2.0) == pytest.approx(0.072 / 0.24, rel=1e-5)
