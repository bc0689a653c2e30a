import pytest

from dapo_mega.rewards.algebra import values_equal
from dapo_mega.rewards.expressions import compare_expressions

EQUAL = [
    (r"\frac{1+\sqrt{5}}{2}", r"0.5+\frac{\sqrt{5}}{2}"),
    (r"\sqrt[3]{54}", r"3\sqrt[3]{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"2\pi/3", r"\frac{2}{3}\pi"),
    ("-2^{2}", "-4"),
    ("4!", "24"),
    (r"e^{i\pi}", "-1"),
    ("(x+1)^{2}", "x^{2}+2x+1"),
    (r"\frac{x}{y}", r"x \cdot y^{-1}"),
    (r"\sin^{2} x", r"1-\cos^2 x"),
    (r"\sin 2x", r"2 \sin x \cos x"),
    (r"\alpha\beta", r"\beta\alpha"),
    ("3-4i", "-4i+3"),
    ("3.1415927", r"\pi"),
]
DIFFERENT = [
    (r"\sqrt{2}", "1.414"),
    ("-2^{2}", "4"),
    ("x-y", "x-z"),
    ("x^{2}", "x^{3}"),
    ("2x", "x+2"),
    (r"\frac{x}{y}", r"\frac{y}{x}"),
    (r"\tan x", r"\cot x"),
    ("3-4i", "3+4i"),
]
# Doubtful to read, beyond exact digits, different for negative numbers only, without value, too large.
OPEN = [
    ("1/2x", "x/2"),
    ("f(0)", "0"),
    (r"2\frac{1}{3}", r"\frac{2}{3}"),
    ("2^10", "1024"),
    (r"\log 100", "2"),
    ("2^{2010}", "2^{2010}+1"),
    ("x+2^{200}", "x+2^{200}+1"),
    (r"\sqrt{x^{2}}", "x"),
    (r"\frac{1}{0}", "1"),
    ("9^{9^{9}}", "1"),
    ("(((9!)!)!)!", "1"),
    (r"\sum_{k=1}^{3} k", "6"),
    (r"\text{six}", "6"),
    ("(1", "1"),
    ("|x|", "x"),
    ("", "1"),
]


def test_plain_expressions_are_decided_as_computer_algebra_would() -> None:
    assert [compare_expressions(*pair) for pair in EQUAL + DIFFERENT] == [True] * len(EQUAL) + [False] * len(DIFFERENT)
    assert [values_equal(*pair) for pair in EQUAL + DIFFERENT] == [True] * len(EQUAL) + [False] * len(DIFFERENT)


@pytest.mark.parametrize(("candidate", "truth"), OPEN)
def test_what_is_in_doubt_is_left_to_computer_algebra(candidate: str, truth: str) -> None:
    assert compare_expressions(candidate, truth) is None


def test_large_integers_are_compared_exactly_by_algebra() -> None:
    assert values_equal("2^{2010}", "2^{2010}+1") is False
    assert values_equal("2^{2010}", "2 \\cdot 2^{2009}") is True


def test_constants_may_differ_within_the_tolerance() -> None:
    assert compare_expressions(r"\sqrt{2}", "1.41", 0.01) is True
    assert compare_expressions(r"\sqrt{2}", "1.3", 0.01) is False
    assert compare_expressions("x", "1.001x", 0.01) is False
