"""Units of measurement that answers carry, so that 5 m is 500 cm and not 5 cm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final


@dataclass(frozen=True)
class Unit:
    """A unit with its dimension (`length`), the power of it, and its size in the dimension's own unit."""

    name: str
    dimension: str
    power: int
    size: Fraction


_SIZES: Final[dict[str, dict[str, str]]] = {
    "length": {
        "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100", "dm decimeter decimetre": "1/10",
        "m meter metre": "1", "km kilometer kilometre": "1000", "in inch inches": "0.0254", "ft foot feet": "0.3048",
        "yd yard": "0.9144", "mi mile": "1609.344",
    },
    "time": {
        "ms millisecond": "1/1000", "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400",
        "week": "604800",
    },
    "calendar": {"month": "1", "yr year": "12", "decade": "120"},
    "mass": {
        "mg milligram": "1/1000000", "g gm gram": "1/1000", "kg kilogram": "1", "oz ounce": "0.028349523125",
        "lb pound": "0.45359237",
    },
    "volume": {"ml milliliter millilitre": "1/1000", "l liter litre": "1"},
    "money": {"cent": "1/100", "dollar usd": "1"},
    "angle": {"degree deg": "1"},
}  # fmt: skip
_UNITS: Final = {
    name: (dimension, Fraction(size))
    for dimension, sizes in _SIZES.items()
    for names, size in sizes.items()
    for name in names.split()
}
_POWERS: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3, "^2": 2, "^3": 3}


@lru_cache(maxsize=1024)
def find_unit(words: str) -> Unit | None:
    """The unit that the words name (`square centimeters`, `cm^2`, `dollars`); None for any other words."""
    power, base = 1, None
    for word in re.sub(r"[{}\\.,]", " ", words.casefold()).replace("^", " ^").split():
        if word in _POWERS:
            power *= _POWERS[word]
        elif base is None:
            base = word
        else:
            return None
    if base is None:
        return None
    known = _UNITS.get(base) or _UNITS.get(base.removesuffix("s")) or _UNITS.get(base.removesuffix("es"))
    return Unit(base, known[0], power, known[1] ** power) if known else None
