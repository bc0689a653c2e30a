import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.rewards import validate_ground_truth
from dapo_mega.rewards.algebra import latex_equal
from dapo_mega.rewards.grading import Grader
from tests.unit.rewards.answers import answers_match
from tests.unit.rewards.hostile import HOSTILE_ANSWERS, shown


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        ("42", "42"),
        ("$42$", "42"),
        ("42.0", "42"),
        ("84/2", "42"),
        ("2^{5}+10", "42"),
        ("m=40, n=2, m+n=42", "42"),
        ("-50", "-50"),
        ("1,000,000", "1000000"),
        ("0.5", r"\frac12"),
        ("9/5", r"1\frac{4}{5}"),
        (r"3.83 \times 10^{35}", "3.83e35"),
        ("evelyn", r"\text{Evelyn}"),
        ("(C)", r"\text{(C)}"),
        ("-2,1", "1,-2"),
        ("$x=1$ or $x=-2$", "1,-2"),
        ("2(k+1)", "2k+2"),
        (r"\sqrt{242}", r"11\sqrt2"),
        ("5", "x=5"),
        ("x=5", "5"),
        ("10x-14y+22z+8=0", "5x - 7y + 11z + 4 = 0"),
        ("2x-y+3=0", "y = 2x + 3"),
        ("2x+3", "y = 2x + 3"),
        (r"(r,\theta)=(3,\pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"\begin{pmatrix} 1/5 \\ -3.6 \end{pmatrix}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
        (r"\cot(x)", r"\cot x"),
        (r"60^{\circ}, 90^{\circ}", r"$90^{\circ}$,$60^{\circ}$"),
        (r"(9,36)\cup(0,9)", r"(0,9) \cup (9,36)"),
    ],
)
def test_equal_answers_match(candidate: str, truth: str) -> None:
    assert answers_match(candidate, truth)


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        ("43", "42"),
        ("-42", "42"),
        ("4 or 42", "42"),
        ("41, 42", "42"),
        ("4.2", "42"),
        ("42.0001", "42"),
        (r"42\pi", "42"),
        (r"x \ne 42", "42"),
        (r"\infty", "42"),
        ("", "42"),
        ("$", "42"),
        (r"\frac{b}{2}", r"$\frac{a b}{2}$"),  # the published rule deletes `a ` as an article
        ("357", "3, 5, 7"),  # and the commas of a list
        ("12", "1,2"),
        ("0", "5x - 7y + 11z + 4 = 0"),  # and the left side of an equation
        ("x=7, y=2", "x=1, y=2"),
        (r"\sqrt{3}", r"2$\sqrt{3}$"),
        ("seat", r"\text{east}"),  # products of the same letters
        ("(3,4)", "(3,4]"),
        ("(6,31,1)", "(6,31,-1)"),
        ("q-p", "p - q"),
        ("1,2", "1,2,3"),
        ("0.0000028", "0.0000027"),
    ],
)
def test_different_answers_do_not_match(candidate: str, truth: str) -> None:
    assert not answers_match(candidate, truth)


@given(st.integers(), st.integers())
def test_integers_match_exactly_when_equal_and_without_computer_algebra(first: int, second: int) -> None:
    assert Grader().grade(str(first), str(second)) is (first == second)
    assert Grader().grade(f"${first:,}$", str(first)) is True


@pytest.mark.timeout(120)
def test_a_hostile_answer_is_wrong() -> None:
    pairs = itertools.product(HOSTILE_ANSWERS, ("42", "x+1"))
    assert [(shown(answer), truth) for answer, truth in pairs if answers_match(answer, truth) is not False] == []


def test_a_giant_power_is_refused_even_if_both_sides_are_equal() -> None:
    assert latex_equal("9^{9^{9^9}}+1", "1+9^{9^{9^9}}") is False


def test_math_verify_is_silent() -> None:
    # In a fresh interpreter: math-verify warns once per process.
    source = """
from dapo_mega.rewards.algebra import latex_equal
assert latex_equal("x+x", "2x")
assert not latex_equal("\\\\frac{1}{", "2x")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", source]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_answers_match_outside_the_main_thread() -> None:
    # math-verify's own time limits would raise there: they need signals.
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(answers_match, "3(m+1)", "3m+3").result() is True


@pytest.mark.parametrize(
    "text", ["42", " -7 ", r"\frac{14}{3}", r"\text{Evelyn}", "x", "(3,4]", r"\{1,2\}", r"\pi", "70,000"]
)
def test_a_comparable_ground_truth_is_returned_stripped(text: str) -> None:
    assert validate_ground_truth(text) == text.strip()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("$$", "no number"),
        ("?!", "no number"),
        (r"\frac{1}{", "braces"),
        ("}1{", "braces"),
        ("1" * 301, "longer than 300"),
        ("9^9^9^9", "powers"),
        ("4\x002", "control"),
        ("(" * 30 + "1" + ")" * 30, "nested"),
    ],
)
def test_an_incomparable_ground_truth_is_refused_with_text_and_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        validate_ground_truth(text)
    assert repr(text)[1:30] in str(refusal.value)
    assert "allowed are integers" in str(refusal.value)


def test_the_message_about_an_endless_ground_truth_is_short() -> None:
    with pytest.raises(ValueError, match="longer than") as refusal:
        validate_ground_truth("7" * 10**6)
    assert len(str(refusal.value)) < 1000
