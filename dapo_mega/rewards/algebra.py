"""Equality of single values and relations by computer algebra, for texts that `bounds` lets pass.

math-verify reads the LaTeX; what it reads is compared here, by exact values and at chosen points, because its own
comparison rounds to six decimals and takes two equations that it cannot solve for equal. It decides what is left.

Nothing here has a time limit of its own: callers with untrusted text run it in a process that they can end.
"""

import logging
from functools import lru_cache
from typing import Any, Final

from dapo_mega.rewards import expressions
from dapo_mega.rewards.bounds import bound_violation

_TINY: Final = 1e-40
_ENOUGH: Final = 3


@lru_cache(maxsize=512)
def parsed(latex: str) -> Any | None:
    """The expression that math-verify reads; None where it reads none or the text exceeds `bounds`."""
    if bound_violation(latex):
        return None
    # Imported here: it takes most of a second, and a process that sees only integers never needs it.
    from math_verify import LatexExtractionConfig, parse

    # The logger tells once per process that its own time limit is off, and warns about each odd LaTeX text.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    config = [LatexExtractionConfig(boxed_match_priority=-1)]
    found = parse(f"${latex}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def latex_equal(candidate: str, truth: str) -> bool:
    """math-verify's own decision; False for a text that cannot be parsed or exceeds `bounds`."""
    first, second = parsed(candidate), parsed(truth)
    if first is None or second is None:
        return False
    from math_verify import verify

    return bool(verify(second, first, timeout_seconds=None))


def values_equal(candidate: str, truth: str, tolerance: float = 0.0) -> bool:
    """Equality of two expressions, exactly, or within the relative tolerance where both are numbers."""
    first, second = parsed(candidate), parsed(truth)
    if first is None or second is None:
        return False
    from sympy import Expr, I, nan, simplify, zoo

    if not (isinstance(first, Expr) and isinstance(second, Expr)):
        return latex_equal(candidate, truth)
    symbols = first.free_symbols | second.free_symbols
    if {str(symbol) for symbol in symbols} == {"i"}:  # As the only symbol it is the imaginary unit.
        unit = dict.fromkeys(symbols, I)
        first, second = first.subs(unit), second.subs(unit)
    if not (first.free_symbols or second.free_symbols):
        a, b = _number(first), _number(second)
        if a is None or b is None:
            return bool(first == second) and not first.has(nan, zoo)  # Both infinite.
        allowed = max(tolerance, expressions.DECIMAL_TOLERANCE * expressions.may_be_rounded(candidate, truth, a, b))
        if allowed and _near(a, b, allowed):
            return True
        if (difference := (first - second).doit()).is_Rational:
            return bool(difference == 0)
        if _near(a, b, expressions.EQUAL):
            return True
        # What cancels out leaves a rest of rounding.
        return (_is_tiny(a) or _is_tiny(b)) and bool(simplify(difference) == 0)
    decided = _equal_at_points(first, second)
    return decided if decided is not None else latex_equal(candidate, truth)


def relations_equal(candidate: str, truth: str) -> bool:
    """Whether two equations or inequalities say the same, up to a factor and the side on which things stand."""
    first, second = parsed(candidate), parsed(truth)
    if first is None or second is None:
        return False
    from sympy import Eq, Ge, Gt, Le, Lt, Ne
    from sympy.core.relational import Relational

    if not (isinstance(first, Relational) and isinstance(second, Relational)):
        return latex_equal(candidate, truth)
    flipped = {Lt: Gt, Gt: Lt, Le: Ge, Ge: Le, Eq: Eq, Ne: Ne}
    if second.func not in (first.func, flipped.get(first.func)):
        return False
    try:
        difference, other = first.lhs - first.rhs, second.lhs - second.rhs
    except TypeError:
        return latex_equal(candidate, truth)
    ratio = _ratio(difference, other)
    if ratio is None and first.func in (Eq, Ne):
        from sympy import fraction, together

        ratio = _ratio(fraction(together(difference))[0], fraction(together(other))[0])
    if ratio is None:
        return bool(first == second)
    if first.func in (Eq, Ne):
        return True
    return ratio > 0 if second.func == first.func else ratio < 0


def _ratio(first: Any, second: Any) -> float | None:
    """The constant real ratio of two expressions; None where there is none."""
    ratios: list[complex] = []
    for point in _places(first, second):
        a, b = _number(first.subs(point)), _number(second.subs(point))
        if a is None or b is None:
            continue
        if _is_tiny(a) or _is_tiny(b):
            return None
        ratios.append(complex(a / b))
    if len(ratios) < _ENOUGH or any(abs(ratio - ratios[0]) > 1e-9 * abs(ratios[0]) for ratio in ratios):
        return None
    return ratios[0].real if abs(ratios[0].imag) < 1e-9 * abs(ratios[0]) else None


def _equal_at_points(first: Any, second: Any) -> bool | None:
    """Equality at numbers of both signs; None where it cannot be evaluated or holds for positive numbers only."""
    agreed = 0
    for index, point in enumerate(_places(first, second)):
        a, b = _number(first.subs(point)), _number(second.subs(point))
        if a is None or b is None:
            continue
        if not (_near(a, b, expressions.EQUAL) or (_is_tiny(a) and _is_tiny(b))):
            return None if index >= expressions.NUM_POSITIVE and agreed >= _ENOUGH else False
        agreed += 1
    return True if agreed > _ENOUGH else None


def _places(first: Any, second: Any) -> list[dict[Any, Any]]:
    """Points at which to evaluate; symbols of one name are one symbol, whatever was assumed of them."""
    from sympy import Float

    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    names = sorted({str(symbol) for symbol in symbols})
    places = []
    for index in range(expressions.NUM_POINTS):
        numbers = expressions.coordinates(index, len(names), lambda text: Float(text, expressions.DIGITS))
        values = dict(zip(names, numbers, strict=True))
        places.append({symbol: values[str(symbol)] for symbol in symbols})
    return places


def _number(expression: Any) -> Any | None:
    """The value, of many digits, of an expression without symbols; None for what is not a finite number."""
    import mpmath
    from sympy import Number

    try:
        real, imaginary = expression.evalf(expressions.DIGITS).as_real_imag()
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return None
    if not (isinstance(real, Number) and isinstance(imaginary, Number) and real.is_finite and imaginary.is_finite):
        return None
    with mpmath.workdps(expressions.DIGITS):
        return mpmath.mpc(mpmath.mpf(str(real)), mpmath.mpf(str(imaginary)))


def _near(a: Any, b: Any, tolerance: float) -> bool:
    return bool(abs(a - b) <= tolerance * abs(b))


def _is_tiny(value: Any) -> bool:
    return bool(abs(value) < _TINY)
