"""Units of measurement that answers carry, so that 5 m is 500 cm and neither 5 cm nor 5 m/s."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final


@dataclass(frozen=True)
class Unit:
    """A unit: the powers of base units in it, and how many of these it is, times a power of pi."""

    name: str
    dimensions: tuple[tuple[str, int], ...]
    size: Fraction
    pi_power: int = 0


# Names, how many, and of what: a newton is `1 kg m s-2`.
_DEFINITIONS: Final = """
m meter metre = 1 m; in inch = 0.0254 m; ft foot feet = 0.3048 m; yd yard = 0.9144 m; mi mile = 1609.344 m
angstrom = 1e-10 m; au = 149597870700 m; ly = 9460730472580800 m; acre = 4046.8564224 m2; hectare = 10000 m2
l L liter litre = 1/1000 m3; gal gallon = 0.003785411784 m3; qt quart = 0.000946352946 m3; pt pint = 0.000473176473 m3
cup = 0.0002365882365 m3; tbsp tablespoon = 0.00001478676478125 m3; tsp teaspoon = 0.00000492892159375 m3
s sec second = 1 s; min minute = 60 s; h hr hour = 3600 s; day = 86400 s; week = 604800 s
month = 1 month; yr year = 12 month; decade = 120 month; century centurie = 1200 month
mph = 0.44704 m s-1; kph kmh kmph = 5/18 m s-1; knot = 463/900 m s-1; fps = 0.3048 m s-1
g gm gram = 1/1000 kg; oz ounce = 0.028349523125 kg; lb pound = 0.45359237 kg; ton = 907.18474 kg; tonne = 1000 kg
N newton = 1 kg m s-2; J joule = 1 kg m2 s-2; W watt = 1 kg m2 s-3; Pa pascal = 1 kg m-1 s-2; Hz hertz = 1 s-1
erg = 1e-7 kg m2 s-2; dyne = 1e-5 kg m s-2; cal calorie = 4.184 kg m2 s-2; eV = 1.602176634e-19 kg m2 s-2
atm atmosphere = 101325 kg m-1 s-2; A amp ampere = 1 A; V volt = 1 kg m2 s-3 A-1; ohm = 1 kg m2 s-3 A-2
mol mole = 1 mol; K kelvin = 1 K; celsius = 1 celsius; fahrenheit = 1 fahrenheit; bit = 1 bit; byte = 8 bit
cent = 1/100 dollar; dollar usd = 1 dollar; euro eur = 1 euro; yen yuan rmb 元 = 1 yen; rupee = 1 rupee
公里 千米 = 1000 m; 米 = 1 m; 厘米 = 1/100 m; 千克 公斤 = 1 kg; 克 = 1/1000 kg; 小时 = 3600 s; 分钟 = 60 s; 秒 = 1 s
degree deg = 1 degree; rad radian = 180 degree pi-1; revolution = 360 degree; rpm = 6 degree s-1
"""
_PREFIXES: Final = {
    "kilo": ("k", "1000"), "centi": ("c", "1/100"), "deci": ("d", "1/10"), "milli": ("m", "1/1000"),
    "micro": ("\u03bc", "1e-6"), "nano": ("n", "1e-9"), "mega": ("M", "1e6"), "giga": ("G", "1e9"),
}  # fmt: skip
_PREFIXED: Final = frozenset(
    re.findall(
        "[a-zA-Z]+",
        "m meter metre g gram l L liter litre s second N newton J joule W watt Pa pascal Hz hertz V volt A ampere eV"
        " mol mole cal calorie byte bit",
    )
)
_POWERS: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_RAISED: Final = {"squared": 2, "cubed": 3}
_HIGHEST_POWER: Final = 9
_MODULUS = re.compile(r"\s*mod ([0-9]{1,20})\s*")
_MONTH = (
    r"(?P<{}>(?:jan|febr)uary|march|april|may|june|july|august|(?:septem|octo|novem|decem)ber"
    r"|(?:jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)(?=[. ]))\.?"
)
_DAY = r"(?P<{}>[0-9]{{1,2}})(?:st|nd|rd|th)?"
DATE = re.compile(
    rf"(?i)(?<![a-z0-9])(?:{_MONTH.format('m1')}[ \t]+{_DAY.format('d1')}"
    rf"|{_DAY.format('d2')}[ \t]+(?:of[ \t]+)?{_MONTH.format('m2')})(?:,?[ \t]+(?P<year>[0-9]{{4}}))?(?![0-9a-z])"
)
"""A day of a year, of any or of a named one."""
_WORD = re.compile(r"\^?-?[0-9]+|[^\W\d_]+|/")
_TEMPERATURE = re.compile(r"(?i)degrees?\s+(?:(c)(?:elsius)?|f(?:ahrenheit)?)(?![a-z])")


def _read_table() -> dict[str, Unit]:
    table = {}
    for definition in re.split(r"[;\n]\s*", _DEFINITIONS.strip()):
        names, _, meaning = definition.partition(" = ")
        number, *bases = meaning.split()
        powers = {base.rstrip("-123"): int(base.lstrip("abcdefghijklmnopqrstuvwxyzAK") or 1) for base in bases}
        pi_power, size = powers.pop("pi", 0), Fraction(number)
        dimensions = tuple(sorted(powers.items()))
        for name in names.split():
            table[name] = Unit(name, dimensions, size, pi_power)
            for word, (sign, factor) in _PREFIXES.items() if name in _PREFIXED else ():
                prefixed = (word if len(name) > 3 else sign) + name
                table[prefixed] = Unit(prefixed, dimensions, size * Fraction(factor), pi_power)
    return table


_UNITS: Final = _read_table()


def _known(word: str) -> Unit | None:
    if word in _UNITS or len(word) == 1:
        return _UNITS.get(word)
    low = word.casefold()
    return next((_UNITS[name] for name in (low, low.removesuffix("s"), low.removesuffix("es")) if name in _UNITS), None)


@lru_cache(maxsize=4096)
def find_unit(words: str) -> Unit | None:
    """The unit that words begin with (`square centimeters`, `m/s^2`, `dollars in all`); None for any other words.

    What money is paid for is left out: 18 dollars per day are 18 dollars.
    """
    if modulus := _MODULUS.fullmatch(words):
        return Unit(f"mod {modulus[1]}", ((f"mod {modulus[1]}", 1),), Fraction(1))
    words = _TEMPERATURE.sub(lambda found: "celsius" if found[1] else "fahrenheit", words)
    parts: list[tuple[Unit, int]] = []
    sign, power = 1, 1
    for word in _WORD.findall(re.sub(r"[{}\\.,]", " ", words)):
        if word in ("/", "per"):
            if not parts or sign < 0:
                return None
            sign = -1
        elif word.casefold() in _POWERS:
            power = _POWERS[word.casefold()]
        elif raised := _RAISED.get(word.casefold()) or (word[-1].isdecimal() and int(word.lstrip("^")[:9])):
            if not parts or abs(parts[-1][1] * raised) > _HIGHEST_POWER:
                return None
            parts[-1] = (parts[-1][0], parts[-1][1] * raised)
        elif unit := _known(word):
            parts.append((unit, sign * power))
            power = 1
        elif not parts or sign < 0 or parts[0][0].name in ("in", "min") or power > 1:
            return None
        else:
            break
    if not parts or power > 1:
        return None
    if parts[0][0].dimensions[0][0] in ("dollar", "euro", "yen", "rupee"):
        del parts[1:]
    dimensions: Counter[str] = Counter()
    size, pi_power = Fraction(1), 0
    for unit, exponent in parts:
        for name, times in unit.dimensions:
            dimensions[name] += times * exponent
        size *= unit.size**exponent
        pi_power += unit.pi_power * exponent
    found = tuple(sorted((name, times) for name, times in dimensions.items() if times))
    return Unit(" ".join(words.split()), found, size, pi_power)
