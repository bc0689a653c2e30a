import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.rewards.bounds import bound_violation, value_digits


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9",
        "9**9**9**9",
        "10^{10^{10}}",
        "10^10^10",
        "9^{9^{9^9}}",
        "((9^{99})^{99})^{99}",
        "2^{999*999*999}",
        "x^{10^9}",
        "(x+1)^{1000000}",
        "99999!",
        "((9!)!)!",
        r"\sum_{n=1}^{1000000} n",
        "9" * 101,
        "1" * 301,
        "(" * 21 + ")" * 21,
        "{" * 100,
        "4\x002",
        "\ud800",
        "4\x1b[2J2",
    ],
)
def test_what_computer_algebra_must_never_see(text: str) -> None:
    assert bound_violation(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "2^{2009}",
        "x^{2017}-1",
        "2010^{2010}",
        "99!",
        "(2n)!",
        r"\frac{2016}{2017^{2}}",
        "(10^{4}, 10^{3}, 10^{10})",
        "e^{x^2}",
        "2^{2^n}",
        r"\binom{100}{50}",
        r"\sum_{k=1}^{100} k",
        "x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1",
        r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}",
        "(" * 20 + ")" * 20,
        "9" * 100,
    ],
)
def test_what_contests_ask_for_is_let_through(text: str) -> None:
    assert bound_violation(text) is None


@given(st.integers(2, 9), st.integers(2, 9), st.integers(1, 4))
def test_the_estimate_is_at_least_the_digits_of_the_value(base: int, middle: int, top: int) -> None:
    value = base ** (middle**top)
    assert value_digits(f"{base}^{{{middle}^{{{top}}}}}") >= (value.bit_length() - 1) * 0.30102
    assert value_digits(f"({base}^{middle})^{top}") >= ((base**middle) ** top).bit_length() * 0.301 - 1


@pytest.mark.timeout(20)
@given(st.text(alphabet="9^!(){}[]\\ x*", max_size=300))
def test_every_bounded_text_is_judged_at_once(text: str) -> None:
    begin = time.process_time()
    bound_violation(text)
    assert time.process_time() - begin < 0.2
