import math

import pytest
import torch

from dapo_mega.metrics import MetricAccumulator


def test_mean_is_weighted_by_hand_derived_numbers():
    metrics = MetricAccumulator()
    metrics.add("policy/loss", 2.0, weight=3)
    metrics.add("policy/loss", torch.tensor(6.0), weight=1)
    metrics.add("policy/entropy", 1.0)
    metrics.add("policy/entropy", 4.0)
    # (2 * 3 + 6 * 1) / 4, and the plain mean of 1 and 4.
    assert metrics.summary() == {"policy/loss": 3.0, "policy/entropy": 2.5}


def test_mean_does_not_depend_on_how_the_tokens_are_split():
    values = [0.5, 1.5, -2.0, 4.0, 8.0]
    whole, split = MetricAccumulator(), MetricAccumulator()
    whole.add("policy/loss", sum(values) / 5, weight=5)
    split.add("policy/loss", sum(values[:2]) / 2, weight=2)
    split.add("policy/loss", sum(values[2:]) / 3, weight=3)
    assert split.summary()["policy/loss"] == pytest.approx(whole.summary()["policy/loss"])


def test_max_and_sum():
    metrics = MetricAccumulator()
    for value in (-3.0, -1.0, -2.0):
        metrics.add_max("policy/grad_norm", value)
        metrics.add_sum("rollout/num_failed", value)
    assert metrics.summary() == {"policy/grad_norm": -1.0, "rollout/num_failed": -6.0}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_shows_in_every_reduction_wherever_it_comes(position):
    values = [1.0, 2.0, 3.0]
    values[position] = math.nan
    metrics = MetricAccumulator()
    for value in values:
        metrics.add("a/mean", value)
        metrics.add_max("a/max", value)
        metrics.add_sum("a/sum", value)
    assert all(math.isnan(value) for value in metrics.summary().values())
    assert len(metrics.summary()) == 3


def test_an_infinity_shows_in_mean_and_sum():
    metrics = MetricAccumulator()
    for value in (1.0, math.inf):
        metrics.add("a/mean", value)
        metrics.add_sum("a/sum", value)
    assert metrics.summary() == {"a/mean": math.inf, "a/sum": math.inf}


def test_a_mean_of_no_weight_is_nan_and_not_an_error():
    metrics = MetricAccumulator()
    metrics.add("policy/loss", 5.0, weight=0)
    assert math.isnan(metrics.summary()["policy/loss"])


def test_reset_forgets_values_and_reductions():
    metrics = MetricAccumulator()
    metrics.add("a/b", 1.0)
    metrics.reset()
    assert metrics.summary() == {}
    metrics.add_max("a/b", 7.0)
    assert metrics.summary() == {"a/b": 7.0}


@pytest.mark.parametrize("name", ["loss", "/loss", "policy/", "policy/a/b", "policy/a b", "Policy/a", ""])
def test_a_malformed_name_is_refused(name):
    metrics = MetricAccumulator()
    for add in (metrics.add, metrics.add_max, metrics.add_sum):
        with pytest.raises(ValueError, match="stage/name"):
            add(name, 1.0)
    assert metrics.summary() == {}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_an_impossible_weight_is_refused(weight):
    metrics = MetricAccumulator()
    with pytest.raises(ValueError, match="weight"):
        metrics.add("a/b", 1.0, weight=weight)
    assert metrics.summary() == {}


def test_a_name_keeps_its_reduction():
    metrics = MetricAccumulator()
    metrics.add("a/b", 1.0)
    with pytest.raises(ValueError, match="two names"):
        metrics.add_sum("a/b", 1.0)
    assert metrics.summary() == {"a/b": 1.0}
