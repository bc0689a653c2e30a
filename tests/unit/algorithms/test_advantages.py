import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.algorithms.advantages import are_equal
from dapo_mega.config import AlgorithmConfig


def advantage(kind):
    return AlgorithmConfig(advantage=kind).advantage


KINDS = ("group_norm", "group_mean", "leave_one_out")


def test_group_norm_divides_by_the_unbiased_std_plus_1e_6():
    # Rewards 1, -1, -1, -1: mean -1/2, unbiased variance (2.25 + 3 * 0.25) / 3 = 1.
    advantages = advantage("group_norm").of_group([1, -1, -1, -1])
    np.testing.assert_allclose(advantages, np.array([1.5, -0.5, -0.5, -0.5]) / (1 + 1e-6), rtol=1e-12)


def test_the_biased_std_would_give_another_number():
    # Two rewards 1 and 0: unbiased std sqrt(1/2), population std 1/2.
    advantages = advantage("group_norm").of_group([1.0, 0.0])
    np.testing.assert_allclose(advantages, np.array([0.5, -0.5]) / (math.sqrt(0.5) + 1e-6), rtol=1e-12)


def test_group_mean_only_centres():
    np.testing.assert_allclose(advantage("group_mean").of_group([1, 0, 0, 1]), [0.5, -0.5, -0.5, 0.5])


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # 3 - (0 + 1) / 2, 0 - (3 + 1) / 2, 1 - (3 + 0) / 2.
    np.testing.assert_allclose(advantage("leave_one_out").of_group([3, 0, 1]), [2.5, -2.0, -0.5])


@pytest.mark.parametrize("kind", KINDS)
@given(value=st.floats(-1e6, 1e6), size=st.integers(2, 64))
def test_equal_rewards_give_exact_zeros(kind, value, size):
    assert advantage(kind).of_group([value] * size).tolist() == [0.0] * size


def test_rewards_that_are_equal_up_to_rounding_are_equal():
    for rewards in (
        [0.1 + 0.2, 0.3],
        [0.7 + 0.1, 0.8, 0.8],
        [0.1 + 0.2 - 0.3, 0.0],
        [np.float32(0.3), 0.3],
        [1e9 + 1e-7, 1e9],
    ):
        assert are_equal(rewards), rewards
        for kind in KINDS:
            assert advantage(kind).of_group(rewards).tolist() == [0.0] * len(rewards), (kind, rewards)
    for rewards in ([0.3, 0.30001], [0.0, 1e-6], [-1.0, 1.0], [1e6, 1e6 + 1]):
        assert not are_equal(rewards), rewards


@pytest.mark.parametrize("kind", KINDS)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=32))
def test_advantages_are_finite_and_sum_to_zero(kind, rewards):
    advantages = advantage(kind).of_group(rewards)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) <= 1e-9 * max(1.0, np.abs(advantages).sum()) + 1e-9 / 1e-6 * 1e-6


@pytest.mark.parametrize("rewards", [[1.0], [[1.0, 2.0]], [1.0, math.nan], [math.inf, 0.0]])
def test_rewards_that_are_no_group_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards must be"):
        advantage("group_norm").of_group(rewards)
