"""Integers in place of an answer: what is asked, and that no other integers would do."""

import pytest

from dapo_mega.preparation.answer_forms import integer_answer
from tests.unit.rewards.answers import answers_match

ASKED = [
    ("integer", [-7], "-7", "", -7),
    (
        *("fraction", [-3, 4], r"-\frac34"),
        r"The answer can be written as $\frac{m}{n}$, where $m$ and $n$ are coprime integers and $n > 0$. "
        "Find $m + n$.",
        1,
    ),
    (
        *("surd", [11, -2, 6, 1], r"11 - 2\sqrt6"),
        r"The answer can be written as $m + n\sqrt{q}$, where $m$ and $n$ are integers, and $q > 0$ is not divisible "
        "by the square of any prime. Find $m + n + q$.",
        15,
    ),
    (
        *("surd", [1, 1, 5, 2], r"\frac{1+\sqrt5}{2}"),
        r"The answer can be written as $\frac{m + n\sqrt{q}}{p}$, where $m$, $n$ and $p$ are integers with greatest "
        "common divisor 1, $p > 0$, and $q > 0$ is not divisible by the square of any prime. Find $m + n + p + q$.",
        9,
    ),
    (
        *("surd", [0, 1, 51, 1], r"\sqrt{51}"),
        r"The answer can be written as $n\sqrt{q}$, where $n$ is an integer, and $q > 0$ is not divisible by the "
        "square of any prime. Find $n + q$.",
        52,
    ),
    (
        *("pi", [0, 3, 2], r"\frac{3}{2}\pi"),
        r"The answer can be written as $\frac{n\pi}{p}$, where $n$ and $p$ are integers with greatest common divisor "
        "1, $p > 0$. Find $n + p$.",
        5,
    ),
    ("pi", [4, 2, 1], r"2\pi + 4", r"The answer can be written as $m + n\pi$, where $m$ and $n$ are integers. "
     "Find $m + n$.", 6),
    ("list", [3, -1, 5], r"\{-1, 3, 5\}", "The answer consists of several integers. Find their sum.", 7),
]  # fmt: skip


@pytest.mark.parametrize(("form", "values", "truth", "addition", "answer"), ASKED)
def test_each_form_makes_the_answer_and_asks_for_its_integers(form, values, truth, addition, answer):
    found = integer_answer(form, values, "What is it?")
    assert (found.addition, found.answer) == (addition, answer)
    assert answers_match(found.value, truth)


NOT_THE_ONLY_ONES = [
    ("fraction", [6, 8], "coprime"),
    ("fraction", [3, -4], "denominator must be above 1"),
    ("fraction", [3, 1], "denominator must be above 1"),
    ("surd", [0, 1, 12, 1], "not be divisible by a square"),
    ("surd", [0, 1, 1, 1], "from 2 to"),
    ("surd", [5, 0, 2, 1], "must not be 0"),
    ("surd", [2, 4, 3, 2], "lowest terms"),
    ("surd", [1, 1, 5, -2], "denominator must be above 0"),
    ("pi", [0, 2, 4], "lowest terms"),
    ("pi", [1, 0, 2], "must not be 0"),
    ("list", [2, 2], "must differ"),
    ("list", [2], "has 2 to 16 values"),
    ("integer", [1, 2], "one value"),
    ("integer", [10**13], "beyond"),
    ("polynomial", [1], "is none of integer, fraction"),
]


def test_integers_that_are_not_the_only_ones_of_their_form_are_refused():
    for form, values, reason in NOT_THE_ONLY_ONES:
        with pytest.raises(ValueError, match=reason):
            integer_answer(form, values, "")


def test_letters_of_the_problem_are_not_used_again():
    found = integer_answer("fraction", [1, 2], r"Let $M$ be $m$ and \frac{n}{2}; p(x) is a polynomial.")
    assert r"$\frac{q}{r}$" in found.addition
    product = integer_answer("fraction", [1, 2], r"If $mn = 12 \text{ pq}$, what is \(\sqrt{np}\)?")
    assert r"$\frac{q}{r}$" in product.addition
    with pytest.raises(ValueError, match="almost every letter"):
        integer_answer("fraction", [1, 2], " ".join("abcdefghijklmnopqrstuvwxyz"))
