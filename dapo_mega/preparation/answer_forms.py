r"""Forms in which an answer can be asked for by integers, and what makes these integers the only ones.

DAPO (arXiv 2503.14476, section 3.5) turns the answer 11 - 2\sqrt{6} into "of the form k - m\sqrt{n}, find k + m + n".
Each form here has conditions under which its integers follow from the answer's value, so the sum is well defined.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MAX_INTEGER: Final = 10**12
_MAX_RADICAND: Final = 10**8
_MAX_LIST: Final = 16
_LETTERS: Final = "mnpqrstuvwkjabcdfghxyz"
_NAME = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_FORMULA = re.compile(r"\$+([^$]*)\$+|\\\[((?:(?!\\\[).)*?)\\\]|\\\(((?:(?!\\\().)*?)\\\)", re.DOTALL)
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname)\s*\{[^}]*\}|\\[A-Za-z]+")


@dataclass(frozen=True)
class IntegerAnswer:
    """What the integers of a form amount to: `value` is the answer in LaTeX that they make, `addition` the sentences
    that are added to the problem (empty if it stays as it is), and `answer` the new answer."""

    value: str
    addition: str
    answer: int


def integer_answer(form: str, values: Sequence[int], problem: str) -> IntegerAnswer:
    """The new question and answer for a problem whose answer has this form with these integers.

    Raises ValueError, with the condition that does not hold, for integers that are not the only ones of their form.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r} is none of {', '.join(FORMS)}")
    if any(abs(value) > MAX_INTEGER for value in values):
        raise ValueError(f"an integer beyond {MAX_INTEGER:,}")
    return FORMS[form](values, _free_letters(problem))


def _integer(values: Sequence[int], _: str) -> IntegerAnswer:
    _require(len(values) == 1, "an integer is one value")
    return IntegerAnswer(str(values[0]), "", values[0])


def _fraction(values: Sequence[int], letters: str) -> IntegerAnswer:
    _require(len(values) == 2, "a fraction has 2 values, numerator and denominator")
    top, bottom = values
    _require(bottom > 1, "the denominator must be above 1")
    _require(math.gcd(top, bottom) == 1, "numerator and denominator must be coprime")
    m, n = letters[0], letters[1]
    return IntegerAnswer(
        rf"\frac{{{top}}}{{{bottom}}}",
        _addition(rf"\frac{{{m}}}{{{n}}}", f"${m}$ and ${n}$ are coprime integers and ${n} > 0$", (m, n)),
        top + bottom,
    )


def _surd(values: Sequence[int], letters: str) -> IntegerAnswer:
    _require(len(values) == 4, "a surd has 4 values, a, b, c and d of (a + b*sqrt(c))/d")
    a, b, c, d = values
    _require(2 <= c <= _MAX_RADICAND, f"the number under the root must be from 2 to {_MAX_RADICAND:,}")
    is_square_free = all(c % (root * root) for root in range(2, math.isqrt(c) + 1))
    _require(is_square_free, "the number under the root must not be divisible by a square")
    letter = letters[3]
    condition = f", and ${letter} > 0$ is not divisible by the square of any prime"
    return _linear((a, b, d), letters, rf"\sqrt{{{c}}}", rf"\sqrt{{{letter}}}", {letter: c}, condition)


def _pi(values: Sequence[int], letters: str) -> IntegerAnswer:
    _require(len(values) == 3, "a multiple of pi has 3 values, a, b and c of (a + b*pi)/c")
    return _linear(values, letters, r"\pi", r"\pi", {}, "")


def _linear(
    values: Sequence[int], letters: str, number: str, symbol: str, more: Mapping[str, int], condition: str
) -> IntegerAnswer:
    """(a + b*x)/d with an irrational x: `values` are a, b and d, and x is given by its number and by its symbol.

    `more` are letters in x with their values, and `condition` is on them. A term that is 0 and a denominator of 1 are
    not written.
    """
    (a, b, d), (first, second, bottom) = values, list(letters[:3])
    _require(b != 0, "the factor before the root or pi must not be 0")
    _require(d > 0, "the denominator must be above 0")
    _require(d == 1 or math.gcd(a, b, d) == 1, "the fraction must be in lowest terms")
    shown = {first: a} if a else {}
    shown[second] = b
    form = f"{first} + {second}{symbol}" if a else f"{second}{symbol}"
    if d > 1:
        shown[bottom] = d
        form = rf"\frac{{{form}}}{{{bottom}}}"
    *others, last = (f"${name}$" for name in shown)
    integers = f"{', '.join(others)} and {last} are integers" if others else f"{last} is an integer"
    if d > 1:
        integers += f" with greatest common divisor 1, ${bottom} > 0$"
    shown |= more
    value = rf"\frac{{{a}+({b}){number}}}{{{d}}}"
    return IntegerAnswer(value, _addition(form, integers + condition, list(shown)), sum(shown.values()))


def _list(values: Sequence[int], letters: str) -> IntegerAnswer:
    _require(2 <= len(values) <= _MAX_LIST, f"a list has 2 to {_MAX_LIST} values")
    _require(len(set(values)) == len(values), "the values of a list must differ")
    return IntegerAnswer(
        ", ".join(map(str, values)), "The answer consists of several integers. Find their sum.", sum(values)
    )


Form = Callable[[Sequence[int], str], IntegerAnswer]
FORMS: Final[dict[str, Form]] = {"integer": _integer, "fraction": _fraction, "surd": _surd, "pi": _pi, "list": _list}


def _addition(form: str, conditions: str, names: Sequence[str]) -> str:
    total = " + ".join(names)
    return f"The answer can be written as ${form}$, where {conditions}. Find ${total}$."


def _free_letters(problem: str) -> str:
    """Letters that the problem uses neither by themselves nor in products of a formula, such as $mn$."""
    formulas = _WORDS.sub(" ", " ".join("".join(found) for found in _FORMULA.findall(problem)))
    used = {name.lower() for name in [*_NAME.findall(problem), *re.findall("[A-Za-z]", formulas)]}
    free = "".join(letter for letter in _LETTERS if letter not in used)
    _require(len(free) >= 4, "the problem uses almost every letter")
    return free


def _require(holds: bool, condition: str) -> None:
    if not holds:
        raise ValueError(condition)
