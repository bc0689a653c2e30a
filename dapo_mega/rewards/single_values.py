"""Reads a single value: a number or expression, with its unit, percent sign and the words around it."""

import re
from fractions import Fraction
from typing import Final

from dapo_mega.rewards.bounds import MAX_NESTING
from dapo_mega.rewards.nodes import Value
from dapo_mega.rewards.normalization import canonical_latex, compact
from dapo_mega.rewards.numerals import Numeral, parse_numeral
from dapo_mega.rewards.units import DATE, Unit, find_unit

# Words for pounds are those of the weight.
_CURRENCIES: Final = {"\\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_CURRENCY = re.compile(r"(?:US|USD|C|A)?\s?(\\\$|[€£¥₹])")
_FACTORS: Final = {
    "hundred": 100, "thousand": 1000, "myriad": 10**4, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12, "score": 20,
}  # fmt: skip
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT_TOKEN = re.compile(
    r"(?P<word>\\text\s*\{[^{}]*\}|(?<![\\a-zA-Z])[^\W\d_\u0370-\u03ff][a-zA-Z.'\-\u00c0-\u024f\u0400-\uffdc]*)|(?P<between>[/.\-\s]|\\cdot(?![a-zA-Z]))"
    r"|(?P<power>\^\s*(?:\{\s*-?[1-3]\s*\}|-?[1-3]))|(?P<other>\\[a-zA-Z]+|.)",
    re.DOTALL,
)
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_AMOUNT = re.compile(r"(?<![a-zA-Z0-9_])[0-9]+(?:[.,][0-9]+)*")
_NEGATION = re.compile(
    r"(?i)(?<![a-z])(?:not|no|never|n't|neither|nor|except|than|least|most|between|over|under|maybe|perhaps|either|if|unless|to"
    r"|unknown|any|anything|other|nicht|keine?|pas|jamais|nunca|não|non|не)(?![a-z])"
)
_NUMBER_WORDS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_PARTS: Final = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10,
}  # fmt: skip
NUMBER_IN_WORDS: Final = (
    r"(?:(?:negative|minus) )?"
    rf"(?:(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_NUMBER_WORDS[1:10])}))?|{'|'.join(reversed(_NUMBER_WORDS))})"
    rf"(?![a-z])(?:[- ](?:{'|'.join(_PARTS)})s?(?![a-z])|(?: (?:{'|'.join(_FACTORS)})(?![a-z]))+)?"
)
# `5 m s^{-1}` is a speed, `2 N m` a torque, and `\\frac{1}{2} m v^2` holds no unit.
_VARIABLES = re.compile(r"[a-z](?:\s?\^\s?\{?[0-9]\}?)?(?:\s+[a-z](?:\s?\^\s?\{?[0-9]\}?)?)+")
_COMPOUND = re.compile(r"(?:[0-9]{1,15}(?:\.[0-9]{1,15})?\s*[a-zA-Z]+\.?[\s,]*){2,4}")
_COMPOUND_PART = re.compile(r"([0-9.]+)\s*([a-zA-Z]+)")
_BASE = re.compile(
    r"\(?0*(?P<digits>(?=[a-fA-F]*[0-9])[0-9a-fA-F.]+)\)?(?:_[{(]*|,?\(?(?:in)?base)(?:base)?(?P<base>[0-9]+|[a-z]{3,7})[)}]*"
)
_BASES: Final = {"binary": "2", "octal": "8", "decimal": "10"}
# What brings letters of its own, and commands and names that are no variables.
_BINDING = re.compile(
    r"\\(?:sum|prod|int|lim|text|mathrm|math\w+|begin|operatorname|min|max|p?mod)|_|[a-zA-Z]{4}|[(,]\s*[a-z]\s*[,)]"
)
_NO_VARIABLE = re.compile(
    r"\\(?!(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega)(?![a-zA-Z]))[a-zA-Z]+"
    r"|(?<![a-zA-Z])(?:sqrt|pi|log|ln|exp|a?sin|a?cos|a?tan|cot|sec|csc)(?![a-zA-Z])"
)
_VARIABLE = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
_MIXED = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]{1,15})\s+(?P<top>[0-9]{1,15})\s*/\s*(?P<bottom>[0-9]{1,15})")


def variables(value: Value) -> frozenset[str] | None:
    """The letters that a value is an expression in, but for e and i; None where a letter may be bound or a word."""
    if _BINDING.search(value.text):
        return None
    return frozenset(_VARIABLE.findall(_NO_VARIABLE.sub(" ", value.text))) - {"e", "i"}


def single_value(text: str, depth: int) -> Value | None:
    """The value that the text is; None of a text without any sign. `depth` counts the readings that this one is in."""
    if date := DATE.fullmatch(_TEXT.sub(r"\1", text).strip()):
        month = (date["m1"] or date["m2"])[:3].casefold()
        return Value(text, f"{month}{int(date['d1'] or date['d2'])}{date['year'] or ''}", None, is_word=True)
    text, sign = _in_digits(text), _CURRENCY.search(text)
    core, factor, unit = _unit(_CURRENCY.sub(" ", text).strip() if sign else text)
    if sign and (unit is None or len(unit.dimensions) > 1):
        unit = find_unit(_CURRENCIES[sign[1]])
    core = _SPACED.sub(lambda number: number.group().replace(" ", ""), core)
    is_percent = core.endswith("%")
    core = core.rstrip("% ").strip()
    if mixed := _MIXED.fullmatch(core):
        core = f"{mixed['sign']}{mixed['whole']}\\frac{{{mixed['top']}}}{{{mixed['bottom']}}}"
    canonical = canonical_latex(core)
    key = compact(canonical)
    if not key:
        return None
    base = _BASE.fullmatch(key)
    named_base = _base_name(base["base"]) if base else None
    if base and named_base:
        key = base["digits"].upper() if named_base == "10" else f"{base['digits'].upper()}_{named_base}"
        canonical, named_base = key, None if named_base == "10" else named_base
    numeral = parse_numeral(key)
    if factor != 1:
        numeral = Numeral(numeral.value * factor, numeral.is_decimal) if numeral else None
        canonical = f"({canonical})\\cdot {factor}"
        key = compact(canonical)
    if numeral is None and (single := _single_amount(core, depth)) is not None:
        return single
    is_word = key.isalpha() and (len(key) >= 4 or "\\text" in text or key.casefold() in ("yes", "no"))
    is_prose = (
        " " in canonical and "\\" not in canonical and len(re.findall(r"(?<![a-zA-Z])[a-zA-Z]{3,}", canonical)) >= 2
    )
    return Value(canonical, key, numeral, is_percent, unit, is_word or is_prose, base=named_base)


def _in_digits(text: str) -> str:
    """The text with the number in words that it begins with, alone or before a unit, in digits: `twenty-five dozen`."""
    if not (text[:1].isalpha() or text.startswith("\\text")):
        return text
    words = _TEXT.sub(r"\1", text).replace("-", " ").casefold().split()
    sign = "-" if words[:1] in (["minus"], ["negative"]) else ""
    words = words[len(sign) :]
    if words[:1] in (["a"], ["an"], ["half"]) and words[-1] in _PARTS and len(words) <= 2:
        words = ["one", words[-1]]
    total, count = 0, 0
    for word in words:
        if word in _NUMBER_WORDS:
            total += _NUMBER_WORDS.index(word)
        elif word in _TENS:
            total += 20 + 10 * _TENS.index(word)
        else:
            break
        count += 1
    if count and len(words) == count + 1 and (part := words[count].removesuffix("s")) in _PARTS:
        return rf"{sign}\frac{{{total}}}{{{_PARTS[part]}}}"
    rest = " ".join(words[count:])
    return (
        f"{sign}{total} {rest}".strip() if count and (not rest or words[count] in _FACTORS or find_unit(rest)) else text
    )


def compound_value(text: str) -> Value | None:
    """The sum of an amount in smaller and smaller units: `5 feet 3 inches`; None of anything else."""
    words = _TEXT.sub(r"\1", text).replace("\\", " ")
    if not words[:1].isdecimal() or not _COMPOUND.fullmatch(words):
        return None
    amounts = [(Fraction(number), find_unit(name)) for number, name in _COMPOUND_PART.findall(words)]
    units = [unit for _, unit in amounts if unit is not None]
    sizes = [unit.size for unit in units]
    if len(units) < len(amounts) or len({unit.dimensions for unit in units}) > 1 or sorted(set(sizes))[::-1] != sizes:
        return None
    total = sum(number * size for (number, _), size in zip(amounts, sizes, strict=True)) / sizes[-1]
    canonical = rf"\frac{{{total.numerator}}}{{{total.denominator}}}"
    return Value(canonical, canonical, Numeral(total, is_decimal=False), unit=units[-1])


def _base_name(name: str) -> str | None:
    """The base as a number: `2` of `2`, `two` and `binary`."""
    if name.isdecimal():
        return name
    return _BASES.get(name) or (str(_NUMBER_WORDS.index(name)) if name in _NUMBER_WORDS else None)


def _unit(text: str) -> tuple[str, int, Unit | None]:
    """The text without the words that follow its number, and the factor (`million`) and unit that these name."""
    cut = _units_start(text)
    core, words = text[:cut].rstrip(), text[cut:]
    if not words.strip() or not (core.endswith("\\pi") or (core and core[-1] in "0123456789})%")):
        return text, 1, None
    plain = _TEXT.sub(r" \1 ", words).replace("\\cdot", " ")
    if _NEGATION.search(plain) or len(plain.split()) > 8:
        return text, 1, None
    factor, rest = 1, plain.split()
    while rest and (times := _FACTORS.get(rest[0].casefold().removesuffix("s"))) and factor < 10**24:
        factor, rest = factor * times, rest[1:]
    unit = find_unit(" ".join(rest))
    if "\\text" in words or factor != 1:
        return core, factor, unit
    is_letter = unit is not None and len(unit.name.partition("^")[0].strip()) == 1
    is_apart = text[len(core)] == " " and ("^" not in plain or unit is None or unit.name[0] == "m")
    if (is_letter and not is_apart) or _VARIABLES.fullmatch(plain.strip()):
        return text, 1, None  # `5m`, `3s^2`, `2 g h`: variables.
    if unit is None and not re.search(r"[^\W\d_\u0370-\u03ff]{3,}|[\u0400-\uffdc]", plain):
        return text, 1, None  # `2ab`
    if re.search(r"\\(?:sin|cos|tan|log|ln|sqrt)", words):
        return text, 1, None
    return core, 1, unit


def _units_start(text: str) -> int:
    """Where the words begin with which the text ends: texts, words, powers of them and what stands between."""
    tokens = list(_UNIT_TOKEN.finditer(text))
    start = len(text)
    for index in range(len(tokens) - 1, -1, -1):
        kind = tokens[index].lastgroup
        if kind == "other" or (kind == "power" and (index == 0 or tokens[index - 1].lastgroup != "word")):
            break
        start = tokens[index].start()
    return start


def _single_amount(text: str, depth: int) -> Value | None:
    """The one number of a phrase: `about 5`, `she has 18 left`."""
    words = _TEXT.sub(r"\1", text)
    if "\\" in words or not re.search(r"[a-zA-Z]{3,}", words) or _NEGATION.search(words) or len(words) > 120:
        return None
    amounts = _AMOUNT.findall(words)
    if len(amounts) != 1 or re.search(r"[a-zA-Z0-9]\s*[\^*/+_]|[\^*/+_]\s*[a-zA-Z0-9(]|[(){}]", words):
        return None
    start = words.index(amounts[0])
    sign = "-" if words[:start].rstrip().endswith("-") and not re.search(r"[a-zA-Z]-$", words[:start].rstrip()) else ""
    amount = sign + words[start:]
    core, factor, unit = _unit(amount)
    if depth >= MAX_NESTING or not re.fullmatch(r"-?[0-9.,]+%?", core.strip()):
        return None
    return single_value(core if unit is None and factor == 1 else f"{core}\\text{{ {amount[len(core) :]}}}", depth + 1)
