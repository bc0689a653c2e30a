"""Exact values of plainly written numbers, so that the common comparisons need no computer algebra."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

# Bounds keep every conversion instant: Python itself refuses int() beyond 4300 digits.
MAX_LITERAL_DIGITS: Final = 100
MAX_DECIMAL_EXPONENT: Final = 1000

# A decimal stands for a fraction such as 1/3 when it agrees with it to about six digits.
_RELATIVE_TOLERANCE: Final = Fraction(1, 10**6)

_SIGN = r"(?P<sign>[+-]?)"
_DIGITS = rf"[0-9]{{1,{MAX_LITERAL_DIGITS}}}"
_INTEGER = re.compile(rf"[+-]?{_DIGITS}")
_DECIMAL = re.compile(
    rf"(?P<mantissa>[+-]?(?:{_DIGITS}(?:\.[0-9]{{0,{MAX_LITERAL_DIGITS}}})?|\.{_DIGITS}))"
    r"(?:[eE](?P<e>[+-]?[0-9]{1,5})"
    r"|(?:\\times|\\cdot|\*)10\^(?:\{(?P<braced>[+-]?[0-9]{1,5})\}|(?P<bare>[0-9])))?"
)
_MIXED = re.compile(rf"{_SIGN}(?P<whole>{_DIGITS})?\\frac\{{(?P<top>-?{_DIGITS})\}}\{{(?P<bottom>-?{_DIGITS})\}}")
_QUOTIENT = re.compile(rf"{_SIGN}(?P<top>{_DIGITS})/(?P<bottom>{_DIGITS})")


@dataclass(frozen=True)
class Numeral:
    """A number as written: its exact value, and whether it was written as a decimal (so may be rounded)."""

    value: Fraction
    is_decimal: bool


def _read_fraction(sign: str, whole: str | None, top: str, bottom: str) -> Numeral | None:
    if int(bottom) == 0:
        return None
    value = int(whole or 0) + Fraction(int(top), int(bottom))
    return Numeral(-value if sign == "-" else value, is_decimal=False)


def parse_numeral(text: str) -> Numeral | None:
    r"""Value of an integer, decimal, power of ten, fraction or mixed number; None for anything else.

    The text must be normalised: `\frac{1}{2}` rather than `\frac12`, no spaces, no thousands commas. Only
    ASCII digits count, and literals beyond the bounds of this module are not numbers here.
    """
    if _INTEGER.fullmatch(text):
        return Numeral(Fraction(int(text)), is_decimal=False)
    if match := _DECIMAL.fullmatch(text):
        exponent = int(match["e"] or match["braced"] or match["bare"] or 0)
        if abs(exponent) > MAX_DECIMAL_EXPONENT:
            return None
        is_decimal = "." in match["mantissa"] or match["e"] is not None
        return Numeral(Fraction(match["mantissa"]) * Fraction(10) ** exponent, is_decimal)
    if match := _MIXED.fullmatch(text):
        return _read_fraction(match["sign"], match["whole"], match["top"], match["bottom"])
    if match := _QUOTIENT.fullmatch(text):
        return _read_fraction(match["sign"], None, match["top"], match["bottom"])
    return None


def numerals_equal(candidate: Numeral, truth: Numeral) -> bool:
    """Equality of values; a decimal also matches a non-integer fraction that it rounds (relative 1e-6).

    Two decimals, and anything against an integer, must agree exactly: an integer has no rounding to forgive.
    """
    if candidate.value == truth.value:
        return True
    if candidate.is_decimal == truth.is_decimal:
        return False
    exact = truth if candidate.is_decimal else candidate
    if exact.value.denominator == 1:
        return False
    return abs(candidate.value - truth.value) <= _RELATIVE_TOLERANCE * abs(exact.value)
