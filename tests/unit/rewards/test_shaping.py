import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.rewards import accuracy_reward, soft_overlong_punishment


def test_accuracy_reward_is_plus_one_or_minus_one_as_in_the_paper() -> None:
    assert accuracy_reward(True) == 1.0
    assert accuracy_reward(False) == -1.0


def test_accuracy_reward_takes_other_values() -> None:
    assert accuracy_reward(True, correct_reward=2.0, incorrect_reward=0.0) == 2.0
    assert accuracy_reward(False, correct_reward=2.0, incorrect_reward=0.0) == 0.0


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (16383, 0.0),
        (16384, 0.0),  # L_max - L_cache: the last length without punishment
        (16385, -1 / 4096),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),  # L_max
        (20481, -1.0),
        (10**9, -1.0),
    ],
)
def test_soft_overlong_punishment_of_the_32b_recipe(length: int, expected: float) -> None:
    assert soft_overlong_punishment(length, max_length=20480, cache_length=4096) == expected


def test_a_cache_as_long_as_the_generation_punishes_from_the_first_token() -> None:
    assert soft_overlong_punishment(0, 10, 10) == 0.0
    assert soft_overlong_punishment(1, 10, 10) == -0.1


@pytest.mark.parametrize(("max_length", "cache_length"), [(10, 0), (10, -1), (10, 11), (0, 0)])
def test_an_impossible_cache_length_is_refused(max_length: int, cache_length: int) -> None:
    with pytest.raises(ValueError, match=f"cache_length={cache_length}"):
        soft_overlong_punishment(5, max_length, cache_length)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length=-1"):
        soft_overlong_punishment(-1, 10, 5)


@given(st.integers(1, 10**5), st.data())
def test_punishment_never_rises_with_length_and_falls_in_equal_steps(max_length: int, data: st.DataObject) -> None:
    cache_length = data.draw(st.integers(1, max_length))
    length = data.draw(st.integers(0, 2 * max_length))
    here = soft_overlong_punishment(length, max_length, cache_length)
    following = soft_overlong_punishment(length + 1, max_length, cache_length)
    assert -1.0 <= following <= here <= 0.0
    inside = max_length - cache_length <= length < max_length
    assert here - following == pytest.approx(1 / cache_length if inside else 0.0, abs=1e-12)
