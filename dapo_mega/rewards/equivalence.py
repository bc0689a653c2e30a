"""Whether an answer equals the ground truth: the rule of the DAPO recipe, and what a ground truth may be.

The recipe compares canonical spellings and leaves the rest to math-verify; style `dapo` follows it. All other styles
compare what the answers are (`grading`).

Model text is never given to `eval`, `exec`, `sympify` or `parse_expr`: math-verify is called with its LaTeX
grammar only, and only on text that `bounds` lets pass.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from dapo_mega.rewards.bounds import MAX_ANSWER_CHARACTERS, bound_violation
from dapo_mega.rewards.grading import Grader, gold_answers, graded, stated_truth
from dapo_mega.rewards.normalization import after_last_equals, canonical_latex, compact, left_sides, split_list
from dapo_mega.rewards.numerals import Numeral, numerals_equal, parse_numeral

_PLAIN_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_ASCII_DIGIT = re.compile(r"[0-9]")
_GRADER: Final = Grader()
# A name that a solution may give to its value: x, x_1, f(x), \theta, (r, \theta).
_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\{\w+\}|\w))?'?(?:\([a-zA-Z0-9,]{0,20}\))?"
_NAMES: Final = re.compile(rf"{_NAME}|\({_NAME}(?:,{_NAME}){{0,9}}\)")


class _Shape(enum.Enum):
    """How to read the equals signs of an answer. The ground truth decides."""

    VALUE = "the text after the last equals sign"
    LIST = "each part of the list after its last equals sign"
    EQUATION = "the whole text"


@dataclass(frozen=True)
class _Truth:
    latex: str
    key: str
    shape: _Shape
    numeral: Numeral | None
    is_word: bool
    has_equals: bool


def _read(latex: str, shape: _Shape) -> str:
    if shape is _Shape.VALUE:
        return after_last_equals(latex)
    if shape is _Shape.LIST:
        return ",".join(after_last_equals(part) for part in split_list(latex))
    return latex


def _shape(latex: str) -> _Shape:
    parts = split_list(latex)
    if any(not _NAMES.fullmatch(compact(side)) for part in parts for side in left_sides(part)):
        return _Shape.EQUATION
    return _Shape.LIST if len(parts) > 1 else _Shape.VALUE


@lru_cache(maxsize=8192)
def _truth(ground_truth: str) -> _Truth:
    latex = canonical_latex(ground_truth)
    shape = _shape(latex)
    key = compact(_read(latex, shape))
    # A word is compared letter by letter: to an algebra system, `seat` is a product that equals `east`.
    is_word = key.isalpha() and (len(key) >= 4 or "\\text" in ground_truth or "\\mbox" in ground_truth)
    has_equals = bool(left_sides(latex))
    return _Truth(latex, key, shape, parse_numeral(key), is_word, has_equals)


def compare_cheaply(candidate: str, ground_truth: str) -> bool | None:
    """Equality by spelling or exact value, without computer algebra; None where that cannot decide.

    The candidate must be of bounded length. Two numbers are always decided, so that integer answers (all of
    DAPO-Math-17k) never need more than this.
    """
    truth = _truth(ground_truth)
    stripped = candidate.strip(" $")
    if _PLAIN_INTEGER.fullmatch(stripped):
        key = stripped
    else:
        key = compact(_read(canonical_latex(candidate), truth.shape))
    if not key:
        return False
    if key == truth.key:
        return True
    if truth.is_word:
        return key.casefold() == truth.key.casefold()
    if truth.numeral is None:
        return None
    numeral = parse_numeral(key)
    if numeral is not None:
        return numerals_equal(numeral, truth.numeral)
    # Nothing written without a digit is worth asking an algebra system whether it equals a number.
    return None if _ASCII_DIGIT.search(key) else False


def symbolic_forms(candidate: str, ground_truth: str) -> tuple[str, str]:
    """The two LaTeX texts, without delimiters, that math-verify is to compare."""
    truth = _truth(ground_truth)
    latex = canonical_latex(candidate)
    if truth.has_equals and left_sides(latex):
        return latex, truth.latex
    return _read(latex, truth.shape), _read(truth.latex, truth.shape)


def answers_match(candidate: str, ground_truth: str | Sequence[str], numeric_tolerance: float = 0.0) -> bool:
    """Whether an extracted answer equals the ground truth; False for an answer that exceeds `bounds`.

    Runs in the calling process without a time limit; `AnswerVerifier` adds the limits that training needs.
    """
    if len(candidate) > MAX_ANSWER_CHARACTERS:
        return False
    golds = map(stated_truth, gold_answers(ground_truth))
    return any(graded(candidate, gold, numeric_tolerance) for gold in golds)


def same_answer(first: str, second: str) -> bool:
    r"""Whether two answers of a model are the same: `1/2` and `0.5` are, and `(x+1)^2` and `x^2+2x+1`.

    Compares what the answers are (`grading`), either of them as the truth. What only computer algebra could decide,
    such as `\log_2 8` and `3`, counts as different, and so does an answer beyond `bounds` unless it is spelt alike: the
    answers of a whole evaluation are compared in the calling process, where nothing would end a slow comparison.
    """
    if first == second:
        return True
    if _PLAIN_INTEGER.fullmatch(first) and _PLAIN_INTEGER.fullmatch(second):
        return int(first) == int(second)
    if bound_violation(first) or bound_violation(second):
        return False
    return _GRADER.grade(first, second) is True or _GRADER.grade(second, first) is True


def validate_ground_truth(text: str) -> str:
    r"""The ground truth without surrounding white space, if answers can be compared with it; each one of a JSON list.

    Raises ValueError, with the text and the reason, for one that is empty or without letter or digit, has
    unbalanced braces, or exceeds `bounds`.
    """
    golds = gold_answers(text)
    if golds != (text,):
        return json.dumps([validate_ground_truth(gold) for gold in golds])
    stripped = text.strip()
    problem = bound_violation(stripped)
    if not stripped:
        problem = "it is empty"
    elif problem is None:
        problem = _structural_problem(stripped)
    if problem is not None:
        shown = text if len(text) <= MAX_ANSWER_CHARACTERS else text[:MAX_ANSWER_CHARACTERS] + "..."
        raise ValueError(
            f"ground truth {shown!r} cannot be compared with answers: {problem}; allowed are integers, "
            f"decimals, fractions, LaTeX expressions and words of at most {MAX_ANSWER_CHARACTERS} characters"
        )
    return stripped


def _structural_problem(text: str) -> str | None:
    key = _truth(text).key
    if not any(character.isalnum() for character in key):
        return "it holds no number, symbol or word"
    unescaped = re.sub(r"\\[\\{}]", "", text)
    depth = 0
    for character in unescaped:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    return "its braces are not balanced" if depth != 0 else None
