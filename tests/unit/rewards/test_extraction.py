import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.rewards import extract_answer, extract_ground_truth
from tests.unit.rewards.growth import growing_too_fast


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Answer: 42", "42"),
        ("so x = 3.\n\nAnswer: $\\frac{1}{2}$\n", "$\\frac{1}{2}$"),
        ("answer : 7", "7"),
        ("ANSWER:\n\n  7", "7"),
        ("Answer: 1\nno, wait\nAnswer: 2", "2"),
        ("Answer: 1\nAnswer: 2\nthat is it", "2"),
        ("Answer: 1 Answer: 2", "1 Answer: 2"),  # one line is one match
        ("**Answer:** 5", "** 5"),
        ("the answer is 42", None),
        ("", None),
        ("Answer:", None),
        ("Answer:     \n  ", None),
    ],
)
def test_dapo_takes_the_last_answer_line(response: str, expected: str | None) -> None:
    assert extract_answer(response) == expected


def test_dapo_looks_only_at_the_last_300_characters() -> None:
    line = "Answer: 42"
    assert extract_answer(line + "\n" + "x" * (300 - len(line) - 1)) == "42"
    assert extract_answer(line + "\n" + "x" * (300 - len(line))) is None


@given(st.text(alphabet="Aanswer: \n$1=", max_size=400) | st.lists(st.sampled_from(["Answer", ":", " ", "\n", "4"])))
def test_dapo_agrees_with_the_published_expression(parts: str | list[str]) -> None:
    response = "".join(parts)
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-300:])
    expected = (found[-1].strip() or None) if found else None
    assert extract_answer(response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed {5}", "5"),
        (r"\boxed{1} and then cut off \boxed{2", None),
        (r"\boxed", None),
        (r"\boxed{}", None),
        ("no box", None),
    ],
)
def test_boxed_takes_the_last_box_with_balanced_braces(response: str, expected: str | None) -> None:
    assert extract_answer(response, "boxed") == expected


@pytest.mark.parametrize(
    ("response", "style", "expected"),
    [
        ("He has 16 - 3 = <<16-3=13>>13.\n#### 18", "gsm8k", "18"),
        ("#### 1\n#### 70,000\nend", "gsm8k", "70,000"),
        ("no mark", "gsm8k", None),
        ("<think>2</think> <answer> 18 </answer>", "r1", "18"),
        ("<answer>1</answer> <answer>2</answer>", "r1", "2"),
        ("<answer>1</answer> <answer>2", "r1", None),
        ("18", "r1", None),
        ("first 3, then -1,250.5, done.", "last_number", "-1,250.5"),
        ("a, b", "last_number", None),
        ("  x + 1 ", "none", "x + 1"),
    ],
)
def test_other_styles(response: str, style: str, expected: str | None) -> None:
    assert extract_answer(response, style) == expected


def test_an_unknown_style_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'xml'.*dapo, boxed, r1, gsm8k"):
        extract_answer("Answer: 1", "xml")


def test_ground_truth_of_a_gsm8k_column() -> None:
    assert extract_ground_truth("9 * 2 = <<9*2=18>>18\n#### 18", "gsm8k") == "18"


def test_a_ground_truth_without_an_answer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no answer of style 'gsm8k' in the ground truth 'eighteen'"):
        extract_ground_truth("eighteen", "gsm8k")


# What stands around, and what is repeated.
HOSTILE = {
    "spaces after the colon": ("Answer:", " ", ""),
    "spaces before the colon": ("Answer", " ", ":"),
    "newlines": ("Answer:", "\n", ""),
    "many answers on one line": ("", "Answer:", ""),
    "many answers on many lines": ("", "Answer: 1\n", ""),
    "digits": ("Answer: ", "9", ""),
    "numbers": ("", "1 ", ""),
    "commas": ("", "1,", ""),
    "open boxes": ("", "\\boxed{", ""),
    "braces": ("\\boxed{", "{", ""),
    "hashes": ("", "#", ""),
    "dollars": ("", "$", ""),
    "dollars around text": ("", "$x$ and ", ""),
    "open formulas": ("", "\\[ $ \\( ", ""),
    "open display": ("", "$$ a \n", ""),
    "closing brackets": ("so $x", ")", "$"),
    "boxes in one sentence": ("", "\\boxed{1}, ", ""),
    "answer words": ("", "answer ", ""),
    "answer is": ("", "the answer is ", ""),
    "answer lines": ("", "Answer:\n\n", ""),
    "headings": ("", "\nFinal Answer\n", ""),
    "answer tags": ("", "<answer>", ""),
    "lines that go on": ("Answer: x is", "\nis\nx is", ""),
    "words between formulas": ("$x$ ", "and ", "z $y$"),
    "stops in formulas": ("Answer: ", "$a. B$ ", ""),
    "thoughts": ("", "<think>", ""),
    "ends of thoughts": ("", "</think>", ""),
    "signs": ("", "-", ""),
    "grouped digits": ("", "123 ", ""),
    "sentences": ("Answer: ", "a. ", ""),
    "fractions": ("", "\\frac{1}{", ""),
    "letters": ("", "A ", ""),
    "null bytes": ("Answer: ", "\0", ""),
    "lone surrogates": ("Answer: \ud800", "\udfff", ""),
}


def hostile_text(case: tuple[str, str], length: int) -> str:
    name, _ = case
    if name == "nested boxes":
        return "\\boxed{" * (length // 8) + "1" + "}" * (length // 8)
    start, unit, end = HOSTILE[name]
    return start + unit * (length // len(unit)) + end


def test_answers_are_taken_out_of_hostile_texts_in_linear_time() -> None:
    cases = itertools.product(
        [*HOSTILE, "nested boxes"], ["dapo", "boxed", "r1", "gsm8k", "auto", "last_number", "none"]
    )
    assert growing_too_fast(lambda case, text: extract_answer(text, case[1]), cases, hostile_text) == {}
