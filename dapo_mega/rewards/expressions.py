r"""Compares plainly written expressions by their values at a few points, without an algebra system.

It reads sums, products, fractions, roots, powers, factorials and the functions of school mathematics, in numbers and
letters. What it does not read without doubt it leaves to computer algebra, which takes a hundred times as long.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from dapo_mega.rewards.bounds import MAX_NESTING, bound_violation, value_digits

DIGITS: Final = 50
EQUAL: Final = 1e-35
"""Relative difference of values of so many digits that are equal."""
_DIFFERENT: Final = 1e-20
DECIMAL_TOLERANCE: Final = 1e-6
"""A decimal stands for an irrational number that it gives to about six digits."""
# Integers of more digits than this are compared exactly, elsewhere.
_EXACT_DIGITS: Final = 30
_MAX_EXPONENT: Final = 400
_MAX_FACTORIAL: Final = 100
# Positive ones first: expressions that differ only elsewhere may mean the same where the problem is asked.
_POINTS: Final = ("0.7310585", "1.6487212", "2.2360679", "3.3166247", "-0.5772156", "-1.9021130")
NUM_POINTS: Final = len(_POINTS)
NUM_POSITIVE: Final = 4

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<command>\\[a-zA-Z]+|\\[{}|])"
    r"|(?P<letter>[a-zA-Z](?![a-zA-Z]{2}))|(?P<sign>[-+*/^!(){}\[\]]))"
)
_GREEK: Final = frozenset(
    f"\\{name}"
    for name in ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "rho", "sigma", "phi", "omega")
)
_FUNCTIONS: Final = {
    **{f"\\{name}": name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "ln")},
    "\\arcsin": "asin", "\\arccos": "acos", "\\arctan": "atan",
}  # fmt: skip
_TIMES: Final = ("\\cdot", "\\times", "*")
_OVER: Final = ("/", "\\div")


class _Unread(Exception):
    """The expression has something that is not read here, or no value."""


@lru_cache(maxsize=4096)
def compare_expressions(candidate: str, truth: str, tolerance: float = 0.0) -> bool | None:
    """Whether two expressions are equal, constants within the relative tolerance; None where algebra must decide."""
    first, second = _tokens(candidate), _tokens(truth)
    if first is None or second is None:
        return None
    letters = _letters(first) | _letters(second)
    if not letters:
        return _compare_constants(candidate, truth, _value_at(first, (), 0), _value_at(second, (), 0), tolerance)
    if max(value_digits(candidate), value_digits(truth)) > _EXACT_DIGITS:
        return None
    return _compare_at_points(first, second, tuple(sorted(letters)))


def value_of(text: str) -> Any | None:
    """The value of an expression without letters, to `DIGITS` digits; None where it is not read or has none."""
    tokens = _tokens(text)
    return None if tokens is None else _value_at(tokens, (), 0)


def _compare_constants(candidate: str, truth: str, first: Any, second: Any, tolerance: float) -> bool | None:
    if first is None or second is None:
        return None
    difference = abs(first - second)
    is_decimal = may_be_rounded(candidate, truth, first, second)
    if max(tolerance, DECIMAL_TOLERANCE * is_decimal) * abs(second) > difference:
        return True
    if difference > _DIFFERENT * max(abs(first), abs(second)):
        return False
    is_certain = difference <= EQUAL * abs(second) and max(map(value_digits, (candidate, truth))) <= _EXACT_DIGITS
    return True if is_certain else None


def may_be_rounded(candidate: str, truth: str, first: Any, second: Any) -> bool:
    """Whether one of two constants, written as a decimal, may be rounded. Whole numbers are not."""
    exact = [value for text, value in ((candidate, first), (truth, second)) if "." not in text]
    return len(exact) < 2 and not any(abs(value - round(value.real)) <= _DIFFERENT * abs(value) for value in exact)


def _compare_at_points(first: tuple[str, ...], second: tuple[str, ...], letters: tuple[str, ...]) -> bool | None:
    for index in range(NUM_POINTS):
        a, b = _value_at(first, letters, index), _value_at(second, letters, index)
        if a is None or b is None:
            return None
        difference, size = abs(a - b), max(abs(a), abs(b))
        if difference > _DIFFERENT * size:
            return False if index < NUM_POSITIVE else None
        if difference > EQUAL * size:
            return None
    return True


@lru_cache(maxsize=8192)
def _value_at(tokens: tuple[str, ...], letters: tuple[str, ...], index: int) -> Any | None:
    """The expression's value at a point, None where it is not read or has none. Remembered, as the answers to one
    problem are compared with one truth, or with each other."""
    values = dict(zip(letters, coordinates(index, len(letters), _context().mpf), strict=True))
    try:
        return _Reader(tokens, values).value()
    except (_Unread, ArithmeticError, ValueError, OverflowError):
        return None


def coordinates(index: int, count: int, number: Callable[[str], Any]) -> list[Any]:
    """The values of `count` letters at one of `NUM_POINTS` points; `number` makes them of decimals.

    They are not in proportion to each other: `x - y` must not be a multiple of `x - z`.
    """
    point, step, bend = map(number, (_POINTS[index], "0.3819660", "0.1353352"))
    sign = 1 if point > 0 else -1
    return [point * (1 + k * step) + sign * bend * k * k for k in range(count)]


@lru_cache(maxsize=1)
def _context() -> Any:
    # Imported here: integers never need it. A context of its own leaves the global precision alone.
    import mpmath

    context = mpmath.MPContext()
    context.dps = DIGITS
    return context


@lru_cache(maxsize=2048)
def _tokens(text: str) -> tuple[str, ...] | None:
    """None for a text that is not read here."""
    if bound_violation(text):
        return None
    tokens, position, text = [], 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match[0].strip())
        position = match.end()
    for index, token in enumerate(tokens):
        if token.isalpha() and tokens[index + 1 : index + 2] == ["("] and tokens[index + 3 : index + 4] == [")"]:
            return None  # `f(0)` is no product.
    return tuple(tokens)


def _letters(tokens: tuple[str, ...]) -> set[str]:
    return {token for token in tokens if (len(token) == 1 and token.isalpha() and token not in "ei") or token in _GREEK}


class _Reader:
    """Recursive descent over the tokens of one expression, with a value for each of its letters."""

    def __init__(self, tokens: tuple[str, ...], values: Mapping[str, Any]) -> None:
        self._tokens = tokens
        self._values = values
        self._next = 0
        self._depth = 0

    def value(self) -> Any:
        """The value of the whole expression. Raises _Unread if it has none."""
        value = self._sum()
        if self._next < len(self._tokens) or not _context().isfinite(value):
            raise _Unread
        return value

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self._peek()
        if not token or (expected and token != expected):
            raise _Unread
        self._next += 1
        return token

    def _sum(self) -> Any:
        self._depth += 1
        if self._depth > 2 * MAX_NESTING:
            raise _Unread
        total = self._product()
        while self._peek() in ("+", "-"):
            total = total + self._product() if self._take() == "+" else total - self._product()
        self._depth -= 1
        return total

    def _product(self) -> Any:
        if self._peek() in ("+", "-"):
            return self._product() if self._take() == "+" else -self._product()
        total, was_number, was_divided = self._power(), self._is_number(self._next - 1), False
        while token := self._peek():
            if token in _TIMES:
                self._take()
                total = total * self._signed_power()
            elif token in _OVER:
                self._take()
                total, was_divided = total / self._signed_power(), True
            elif token in ("+", "-", ")", "}", "]", "!"):
                break
            else:
                # `1/2x` and `2\frac{1}{3}` have two readings.
                if was_divided or (was_number and (token == "\\frac" or self._is_number(self._next))):
                    raise _Unread
                total = total * self._power()
            was_number = False
        return total

    def _is_number(self, index: int) -> bool:
        return index < len(self._tokens) and self._tokens[index][0] in ".0123456789"

    def _signed_power(self) -> Any:
        if self._peek() == "-":
            self._take()
            return -self._power()
        return self._power()

    def _power(self) -> Any:
        base = self._atom()
        if self._peek() == "!":
            self._take()
            if base != _context().nint(base.real) or not 0 <= base.real <= _MAX_FACTORIAL or self._peek() == "!":
                raise _Unread
            base = _context().factorial(base)
        if self._peek() != "^":
            return base
        self._take()
        if self._peek()[:1].isdigit() and len(self._peek()) > 1:
            raise _Unread  # LaTeX raises to the first digit, people mean both.
        exponent = self._atom()
        if self._peek() == "^" or abs(exponent) > _MAX_EXPONENT or (base == 0 and not exponent.real > 0):
            raise _Unread
        result = base**exponent
        if self._peek() == "!":
            raise _Unread
        return result

    def _atom(self) -> Any:
        token = self._take()
        context = _context()
        if token[0] in ".0123456789":
            return context.mpc(token)
        if token in self._values:
            return self._values[token]
        if token in ("(", "{", "["):
            value = self._sum()
            self._take({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token == "\\frac":
            top, bottom = self._argument(), self._argument()
            return top / bottom
        if token == "\\sqrt":
            return self._root()
        if token in ("\\pi", "e"):
            return context.mpc(context.pi if token == "\\pi" else context.e)
        if token == "i":
            return context.mpc(0, 1)
        if token in _FUNCTIONS:
            return self._function(_FUNCTIONS[token])
        raise _Unread

    def _argument(self) -> Any:
        self._take("{")
        value = self._sum()
        self._take("}")
        return value

    def _root(self) -> Any:
        degree = None
        if self._peek() == "[":
            self._take()
            degree = self._sum()
            self._take("]")
        value = self._argument()
        if degree is None:
            return _context().sqrt(value)
        if degree.imag or not 1 <= degree.real <= _MAX_EXPONENT or value.imag or value.real < 0:
            raise _Unread
        return value ** (1 / degree)

    def _function(self, name: str) -> Any:
        power = None
        if self._peek() == "^":
            self._take()
            token = self._tokens[self._next : self._next + 3]
            if token[:1] == ("2",):
                self._next += 1
            elif token == ("{", "2", "}"):
                self._next += 3
            else:
                raise _Unread
            power = 2
        if self._peek() in ("(", "{"):
            argument = self._atom()
            if self._peek() == "^":
                raise _Unread
        else:
            argument = self._bare_argument()
        value = getattr(_context(), name)(argument)
        return value if power is None else value**power

    def _bare_argument(self) -> Any:
        r"""The factors after a function without brackets: `\sin 2x`."""
        total = self._power()
        while (token := self._peek()) and (token in self._values or token == "\\pi"):
            total = total * self._power()
        if self._peek() in ("(", "[", *_OVER):
            raise _Unread
        return total
