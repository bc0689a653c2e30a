"""Sums over time within responses, generalised advantages, and the entropy bonus that follows a target."""

import numpy as np
import pytest

from dapo_mega.algorithms.entropy_control import EntropyControl
from dapo_mega.algorithms.returns import discounted_sums, generalized_advantages, is_last_of_segment


def test_sums_run_to_the_end_of_the_response_only():
    assert discounted_sums([1, 2, 4, 8], [0, 0, 3, 3], 1.0).tolist() == [3, 2, 12, 8]
    assert discounted_sums([1, 2, 4, 8], [0, 0, 0, 3], 0.5).tolist() == [3, 4, 4, 8]
    assert discounted_sums([], [], 1.0).tolist() == []


def test_generalized_advantages_by_hand():
    # One response, reward 1 at its end, values 0.5, 0.25; gamma = 1/2, lambda = 1/2:
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.125 - 0.5 = -0.375; A_0 = -0.375 + 0.75 / 4.
    advantages = generalized_advantages([0, 1], [0.5, 0.25], [7, 7], discount=0.5, decay=0.5)
    assert advantages.tolist() == pytest.approx([-0.1875, 0.75])


def test_without_discount_an_advantage_is_what_follows_minus_the_value():
    rng = np.random.default_rng(0)
    ids = np.repeat([0, 1, 4], [5, 1, 7])
    rewards, values = rng.normal(size=13), rng.normal(size=13)
    got = generalized_advantages(rewards, values, ids, discount=1.0, decay=1.0)
    following = np.array([rewards[t:][ids[t:] == ids[t]].sum() for t in range(13)])
    assert got == pytest.approx(following - values)


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0)])
def test_generalized_advantages_against_their_definition(discount, decay):
    """sum_l (gamma lambda)^l delta_{t+l}, term by term."""
    rng = np.random.default_rng(1)
    ids = np.repeat([2, 3], [6, 4])
    rewards, values = rng.normal(size=10), rng.normal(size=10)
    expected = []
    for t in range(10):
        own = [k for k in range(t, 10) if ids[k] == ids[t]]
        deltas = [rewards[k] + discount * (values[k + 1] if k + 1 in own else 0.0) - values[k] for k in own]
        expected.append(sum((discount * decay) ** i * delta for i, delta in enumerate(deltas)))
    got = generalized_advantages(rewards, values, ids, discount=discount, decay=decay)
    assert got == pytest.approx(np.array(expected))


def test_the_last_token_of_every_response_is_known():
    assert is_last_of_segment([0, 0, 3, 5, 5]).tolist() == [False, True, True, False, True]
    assert is_last_of_segment([]).tolist() == []


def test_a_constant_entropy_bonus_stays():
    control = EntropyControl(0.01, None, 0.005)
    control.observe(0.0)
    assert control.current() == 0.01


def test_the_entropy_bonus_follows_its_target():
    control = EntropyControl(0.0, 0.2, 0.005)
    assert control.current() == 0.0, "nothing is measured yet"
    for expected in (0.005, 0.01):
        control.observe(0.1)
        assert control.current() == pytest.approx(expected)
    continued = EntropyControl(0.0, 0.2, 0.005)
    continued.load_state(control.state())
    continued.observe(0.3)
    assert continued.current() == 0.0, "above the target"
    continued.observe(0.1)
    assert continued.current() == pytest.approx(0.01), "it had fallen by one step meanwhile"
    for _ in range(9):
        continued.observe(0.3)
    continued.observe(0.1)
    assert continued.current() == pytest.approx(0.005), "it never falls below 0"


def test_the_entropy_bonus_has_an_upper_bound():
    control = EntropyControl(0.0, 0.2, 0.005, maximum=0.012)
    for expected in (0.005, 0.01, 0.012, 0.012):
        control.observe(0.1)
        assert control.current() == pytest.approx(expected)
    continued = EntropyControl(0.0, 0.2, 0.005, maximum=0.003)
    continued.load_state(control.state())
    assert continued.current() == 0.003


def test_an_entropy_bonus_that_is_to_begin_anew_does():
    """Also from a checkpoint of an earlier version, which has two values, the place is taken up."""
    control = EntropyControl(0.0, 0.2, 0.005)
    control.observe(0.1)
    for state, start, expected in (
        (control.state(), 0.0, 0.005),
        (control.state(), 0.1, 0.1),
        ((0.02, 0.1), 0.1, 0.02),
    ):
        continued = EntropyControl(start, 0.2, 0.005)
        continued.load_state(state)
        assert continued.current() == expected
