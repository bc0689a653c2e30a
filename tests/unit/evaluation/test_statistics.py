"""pass@k against fractions, intervals against textbook values, and the paired test against counting by hand."""

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from dapo_mega.evaluation.statistics import (
    estimate_means,
    paired_p_value,
    pass_at_each_k,
)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_sample():
    for n, c, k in ((5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 2), (4, 1, 4)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_each_k(n, c, k)[-1] == pytest.approx([sum(map(any, draws)) / len(draws)]), (n, c, k)


def test_pass_at_k_equals_fractions_up_to_2048_samples_and_k_1024():
    correct = [0, 1, 2, 7, 600, 1023, 1024, 1025, 2047, 2048]
    curve = pass_at_each_k([2048] * len(correct), correct, 1024)
    assert curve.shape == (1024, len(correct))
    for k in (1, 2, 3, 64, 1000, 1024):
        exact = [float(1 - Fraction(comb(2048 - c, k), comb(2048, k))) for c in correct]
        assert curve[k - 1] == pytest.approx(exact, rel=1e-11, abs=0), k


def test_pass_at_k_takes_problems_with_different_numbers_of_samples():
    assert pass_at_each_k([4, 8], [1, 1], 4)[-1] == pytest.approx([1.0, 0.5])


def test_more_draws_than_samples_are_refused():
    with pytest.raises(ValueError, match="k=4 must be between 1 and the number of samples 3"):
        pass_at_each_k([3, 9], [1, 1], 4)
    with pytest.raises(ValueError, match="correct samples must be between 0"):
        pass_at_each_k(3, 4, 1)


def test_an_interval_of_many_problems_is_the_normal_one():
    values = np.random.default_rng(1).normal(0.3, 0.5, 2000)
    estimate = estimate_means(values)[0]
    error = values.std() / 2000**0.5
    assert estimate.value == pytest.approx(values.mean())
    assert (estimate.low - estimate.value) / error == pytest.approx(-1.96, abs=0.08)
    assert (estimate.high - estimate.value) / error == pytest.approx(1.96, abs=0.08)


def test_an_interval_leans_towards_the_long_tail_and_stays_within_the_values():
    estimate = estimate_means([0.0] * 27 + [1.0] * 3)[0]
    assert estimate.high - estimate.value > 1.3 * (estimate.value - estimate.low)
    assert 0 < estimate.low < 0.1 < estimate.high < 0.35


def test_intervals_are_the_same_in_every_call_and_beside_other_rows():
    rows = np.random.default_rng(2).random((2, 40))
    first, second = estimate_means(rows)
    # Only the order of additions differs: a matrix is multiplied in another order than a row.
    assert [first.low, first.high] == pytest.approx(
        [estimate_means(rows[0])[0].low, estimate_means(rows[0])[0].high], abs=1e-12
    )
    assert estimate_means(rows) == [first, second]


def test_problems_of_one_value_show_no_spread():
    estimate = estimate_means([0.1] * 7)[0]
    assert estimate.low == estimate.high == estimate.value == pytest.approx(0.1)


def test_the_paired_test_counts_sign_patterns_exactly_where_few_problems_differ():
    # Five problems won by the same amount: 2 of 32 patterns are as far from 0. Problems that do not differ say nothing.
    assert paired_p_value([0.25] * 5) == pytest.approx(2 / 32)
    assert paired_p_value([0.25] * 5 + [0.0] * 9) == pytest.approx(2 / 32)
    # 3 - 1: the patterns that sum to 2 or more in magnitude are all but those that sum to 0, 10 of 16.
    assert paired_p_value([1, 1, 1, -1]) == pytest.approx(10 / 16)
    assert paired_p_value([0.0, 0.0]) == 1.0
    # They sum to 0, which floats of thirtieths do not.
    assert paired_p_value(np.array([0, -30, 10, 28, -8]) / 30) == 1.0


def test_the_paired_test_of_many_problems_is_the_binomial_one():
    # 60 problems won and 40 lost by the same amount: the two-sided sign test's p is 0.0569.
    exact = 2 * sum(comb(100, wins) for wins in range(60, 101)) / 2**100
    assert paired_p_value([0.5] * 60 + [-0.5] * 40) == pytest.approx(exact, abs=0.007)
    assert paired_p_value([0.5] * 100) == pytest.approx(1 / 10_001)
