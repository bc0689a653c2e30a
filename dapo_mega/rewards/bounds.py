"""Checks cheaply that a text is small enough for computer algebra: no huge numbers or expressions.

The bounds refuse what is hostile or absurd on sight. They cannot foresee every slow expression; the time
and memory limits of the worker pool are there for the rest.
"""

import math
import re
from functools import lru_cache
from typing import Final

from dapo_mega.rewards.numerals import MAX_LITERAL_DIGITS

MAX_ANSWER_CHARACTERS: Final = 300
MAX_NESTING: Final = 20
MAX_VALUE_DIGITS: Final = 20_000

_OPENERS = "({["
_CLOSERS = ")}]"
_LONG_LITERAL = re.compile(rf"[0-9]{{{MAX_LITERAL_DIGITS + 1}}}")
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_LITERAL = re.compile(r"[0-9]+")
# Control characters, lone surrogates and non-characters have no place in an answer.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def bound_violation(text: str) -> str | None:
    """The reason, in words, why the text must not reach computer algebra; None if it may."""
    return _violation(text) if len(text) <= MAX_ANSWER_CHARACTERS else f"longer than {MAX_ANSWER_CHARACTERS} characters"


@lru_cache(maxsize=8192)
def _violation(text: str) -> str | None:
    """Remembered, as each answer to a problem is compared with many others."""
    if _UNPRINTABLE.search(text):
        return "contains control characters"
    if _nesting(text) > MAX_NESTING:
        return f"brackets nested more than {MAX_NESTING} deep"
    if _LONG_LITERAL.search(text):
        return f"a number of more than {MAX_LITERAL_DIGITS} digits"
    if value_digits(text) > MAX_VALUE_DIGITS:
        return f"powers or factorials of more than {MAX_VALUE_DIGITS} digits"
    return None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in _OPENERS:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSERS:
            depth = max(depth - 1, 0)
    return deepest


@lru_cache(maxsize=8192)
def value_digits(text: str) -> float:
    """Upper estimate, in decimal digits, of any number that powers, factorials and products can build.

    Symbols count as one digit under a power, so `x^{100}` is 100 and `9^{9^9}` is beyond all bounds.
    The nesting of the text must have been checked: the estimate recurses once per bracket.
    """
    digits, _ = _product(text.replace("**", "^"), 0)
    return digits


def _product(text: str, start: int) -> tuple[float, int]:
    """Sum of the digits of neighbouring factors, up to the bracket that closes them."""
    total, position = 0.0, start
    while position < len(text):
        if text[position] in _CLOSERS and start > 0:
            break
        digits, position = _power(text, position)
        total += digits
    return total, position


def _power(text: str, start: int) -> tuple[float, int]:
    digits, position = _atom(text, start)
    while position < len(text):
        if text[position] == "^":
            exponent, position = _power(text, position + 1) if position + 1 < len(text) else (0.0, len(text))
            digits = _raised(max(digits, 1.0), exponent)
        elif text[position] == "!":
            digits = _raised(max(digits, 1.0), digits) if digits > 0 else 0.0
            position += 1
        elif text[position] == " ":
            position += 1
        else:
            break
    return digits, position


def _raised(digits: float, exponent_digits: float) -> float:
    """Digits of b^e, from those of b and e; infinite once far beyond the bound."""
    return digits * 10.0**exponent_digits if exponent_digits < 9 and digits < 1e9 else math.inf


def _atom(text: str, start: int) -> tuple[float, int]:
    character = text[start]
    if character in _OPENERS:
        digits, end = _product(text, start + 1)
        return digits, end + 1
    if match := _LITERAL.match(text, start):
        literal = match.group()
        digits = math.log10(max(int(literal), 1)) if len(literal) <= 15 else float(len(literal))
        return digits, match.end()
    if match := _COMMAND.match(text, start):
        return 0.0, match.end()
    return 0.0, start + 1
