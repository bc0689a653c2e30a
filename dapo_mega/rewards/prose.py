"""What a sentence without formulas states at its end: numbers with their units, tuples, lists, expressions, a word."""

import re
from functools import lru_cache
from typing import Final

from dapo_mega.rewards.denials import is_denied
from dapo_mega.rewards.single_values import NUMBER_IN_WORDS, compound_value
from dapo_mega.rewards.units import DATE, find_unit

_AMOUNT = (
    r"(?:[0-9]{1,3}(?:[ \u00a0\u202f,][0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:[.,][0-9]+)*|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+)?"
)
NUMBER = re.compile(
    rf"(?<![0-9a-zA-Z_.,])[+\-\u2212]?[ \t]?(?:[$€£¥₹]|\\\$)?[ \t]?(?:\\[dt]?frac\s?\{{[+-]?[0-9]+\}}\{{[0-9]+\}}"
    rf"|[0-9]{{0,40}}\.[0-9]{{0,40}}(?:\([0-9]{{1,40}}\)|(?:\\(?:overline|bar|dot)\s?\{{?[0-9]{{1,40}}\}}?)+)"
    rf"|{_AMOUNT}(?:(?:(?::|[ \t]{{1,2}}:[ \t]{{1,2}}|[ \t]{{0,2}}[/^][ \t]{{0,2}}){_AMOUNT}){{1,3}}"
    r"|[ ][0-9]+/[0-9]+)?)"
)
# Several numbers of one statement: `(3, 4)`, `the roots are 2 and 3`.
_BRACKETED = re.compile(r"[(\[{][^()\[\]{}a-zA-Z\n]{0,60},[^()\[\]{}a-zA-Z\n]{0,60}[)\]}]")
NUMBER_IN_LIST = rf"(?:[a-zA-Z][ \t]?=[ \t]?)?[+\-\u2212]?{_AMOUNT}(?:/[0-9]+)?"
_LISTED_NUMBERS = re.compile(
    rf"(?<![a-z])are[ \t]+(?:at[ \t]+)?(?P<list>{NUMBER_IN_LIST}"
    rf"(?:(?:,[ \t]*(?:and[ \t]+)?|[ \t]+(?:and|or)[ \t]+){NUMBER_IN_LIST}){{1,9}})"
)
_EITHER = re.compile(rf"{NUMBER_IN_LIST}(?:,? or {NUMBER_IN_LIST})+")
_AMOUNTS = re.compile(r"[0-9.]{1,15}[ ][a-z]{1,12}(?:,? and |,? )[0-9.]{1,15}[ ][a-z]{1,12}")
_ANOTHER_AMOUNT = re.compile(r"[0-9.][ ][a-z]{1,12}(?:,? and |,? )[0-9.]")
_SCIENTIFIC = re.compile(
    rf"[+\-\u2212]?{_AMOUNT}[ ]?[\u00d7x][ ]?10"
    r"(?:\^\{?[+\-\u2212]?[0-9]{1,4}\}?|[\u2070-\u207f\u00b9\u00b2\u00b3]+)"
)
_RATIO = re.compile(rf"{_AMOUNT}(?:[ \t]to[ \t]{_AMOUNT}){{1,3}}")
_ROWS = re.compile(r"\[\s*\[[^a-zA-Z\n]{0,100}\]\s*\]")
_MONTH_NEAR = re.compile(r"Jan|Feb|Ma[ry]|Apr|Ju[nl]|Aug|Sep|Oct|Nov|Dec")
_LONGEST_EXPRESSION: Final = 80
# `48 + 24 = 72`
_CALCULATED = re.compile(r"(?:(?:[ ]x[ ](?=[0-9(])|[-+*/()0-9., \u00d7\u2212])+=)+[ ]?[-\u2212]?[0-9.,]+")
_NO_NUMBER = re.compile(r"[a-zA-Z\\πθ√^=+*,(]|[0-9]\s?[-/]")
_SAYS = re.compile(
    r"[^a-zA-Z\\](?:(?<==)|(?:[iI]s|[aA]re|[eE]quals|[sS]o|[tT](?:hus|herefore|o)|[hH](?:ence|ave)|[gG]et|[oO]btain|[fF]ind"
    r"|[bB]e)(?=[ \t,]))"
)
_EXPRESSION = re.compile(
    r"(?P<value>(?:[-+*/^=(){},0-9πθ√° \t−×·±≈∞∪<>≤≥≠²³⁰¹⁴-⁹⁻\[\]]|\.(?=[0-9])|\\[a-zA-Z]+"
    r"|(?<![a-zA-Z])(?:(?!an?\s[a-z]{2}|is|in|of|as|at|by|to|so|we|he|be|do|go|no|on|up|us|it|if|an|my|th|st|nd|rd)[a-zA-Z]{1,2}"
    r"|sqrt|sin|cos|tan|log|exp|and|or)(?![a-zA-Z]))+?)(?:[ \t](?:[a-zA-Z]{3,}|[cmk]?m[²³]?)){0,3}[.!]?"
)
# `three quarters, i.e. 3/4`: the same value again.
_RESTATED = re.compile(
    r"(?:[,;:(\u2014\u2013]\s{0,3}|\s)(?:or,?\s)?(?:i\.?e\.?|namely|equivalently|in other words|that is to say"
    r"|(?<=[,(\u2014\u2013] )that is"
    r"|which (?:is the same as|is equivalent to|equals|simplifies to|can (?:also )?be written as))[,:]?\s"
)
_ONLY_VALUE = re.compile(
    rf"(?:\$[^$\n]{{1,80}}\$|\\\([^\n]{{1,80}}?\\\)|{NUMBER.pattern}|(?:an? )?(?i:{NUMBER_IN_WORDS}))"
    r"(?:[ ]?(?:\\?%|\u00b0)|[ ](?!more|less|fewer|times|of|and|or)[a-zA-Z]{1,12}){0,2}[\s).*]*$"
)
# What stands beside a value: `12 (8 + 4)`, `12 (8 + 4) rows`, `1/3, or about 0.333`, `4, attained at x = 2`,
# `12, since 11 is odd`.
_CALCULATION = re.compile(
    r"(?<=[0-9a-z])[ ]\([0-9. ]{1,20}(?:[-+*/=\u00d7\u2212\u00b7][0-9. ]{1,20}){1,6}\)(?=[.!]?\s*$)"
    r"|(?<=[0-9])((?:[ ][a-z]{1,12})?)[ ]\([0-9. ]{1,20}(?:[-+*/\u00d7\u2212][0-9. ]{1,20}){1,6}\)"
    r"(?=(?:[ ][a-z]{1,12}){1,4}[.!]?\s*$)"
    r"|(?<=[0-9])[ ]\([0-9.]{1,20}\s?\\?%\)"
)
_ROUNDED = re.compile(
    r"((?:/[ \t]?[0-9]{1,20}|[}\u03c0])[ \t]?(?:\$|\\\))?)[\s,;(]{1,3}(?:or|which is|that is|i\.e\.),?\s"
    r"(?:approximately|approx\.|about|roughly|around)\s\$?[0-9]{0,20}\.[0-9]{1,20}\$?"
)
_TAKEN_AT = re.compile(
    r"(?:(?<![a-z])(?:is|of|be|equals)\s|(?=\$[^$\n]{1,60}\$,?\sfor\s))(?P<value>\$[^$\n]{1,60}\$|[^\s$,;]{1,30}),?\s"
    r"(?:(?:and|which|it|is|occurs)\s){0,3}"
    r"(?:(?:attained|achieved|reached|obtained|occurring|at|when|if|for(?: all| every)?|whenever)\s){1,2}"
    r"\$?\(?[a-z](?:\s?[=,]\s?[a-z]){0,3}\)?\s?(?:[=<>\u2264\u2265]|\\[gln]e|\\in(?![a-z]))"
    r"(?:(?!, [a-z])[^.\n]){1,60}\.?\s*$"
)
_SIGN_OF_VARIABLE = re.compile(r"[=<>\u2264\u2265\\](?:(?<=[a-z)].)|(?<=[a-z)]\s.))")
_REASON = re.compile(
    r"(?P<value>[0-9$}][^.,;:\n0-9$]{0,40})(?:,\s(?:since|because|as)|\swhen(?=[a-z ]{1,40}divided))\s"
    r"[^.=\n]{1,120}\.?\s*$"
)
# `150 miles in 2.5 hours`, `3 of the 5 children own a bicycle`: what the value is measured by.
_QUALIFIED = re.compile(
    r"(?<![0-9.,/])[0-9][0-9.,]*(?:(?P<value>(?:\s(?!in|of)[a-z]{2,20}){1,4})\sin\s(?:just\s|only\s)?[0-9.]{1,9}"
    r"\s(?:second|minute|hour|day|week|month|year)s?|(?P<part>%?)\sof\s(?:the|those|these|his|her|its|their)"
    r"\s(?:original\s)?\$?[0-9,]{1,9}\s[a-z][a-z ]{1,60})\.?\s*$"
)
# `5 values of $x$ satisfy this`: what is counted is no value.
_COUNTED = re.compile(
    rf"(?P<value>{NUMBER.pattern}|\$[^$\n]{{1,80}}\$|\\\([^\n]{{1,80}}?\\\))\s(?:[a-z]{{2,20}}\s){{0,4}}"
    r"(?:(?!consists)[a-z]{2,20}s\sof|(?:integers|numbers|pairs|triples|values|primes|solutions|ways)(?:\sfor)?)\s"
    r"(?:\$|\\\()\(?[a-zA-Z](?:\s?,\s?[a-zA-Z]){0,4}\)?(?:\$|\\\))[^$\\0-9.\n]{0,80}\.?\s*$"
)
_VARIABLE_AT_END = re.compile(r"[a-zA-Z]\)?(?:\$|\\\))[^$\\0-9.\n]{0,80}\.?\s*$")
_COMPARISON = re.compile(r"[,，]\s?(?:比|其中)[^,，。\n]{1,40}[。.]?\s*$")
_CONDITIONS: Final = (" at ", " when", " if ", " for ", "attained", "achieved", "reached", "obtained", "occur")
_ABOUT: Final = ("approx", "about", "roughly", "around")
_REASONS: Final = (", since", ", because", ", as ", " when")
_WORDS_AFTER = re.compile(r"[ \t]?(?:[^\W\d_]{1,14}[²³]?|\^\{?[23]\}?|/)(?:[ \t]?(?:[^\W\d_]{1,14}[²³]?|/)){0,3}")
_RAISED = str.maketrans({"²": "^2", "³": "^3"})
# A word in bold, or a name, that ends the last sentence: `so it was **Tuesday**`.
WORD_IN_BOLD = re.compile(r"[a-z,:][ \t]+\*\*(?P<bold>[A-Za-z][A-Za-z \-]{0,40})\*\*[.!]?$")
NAME_AT_END = re.compile(
    r"(?<![a-zA-Z])(?:is|was|be|falls on)[ \t]+(?:(?:an?|the)[ \t]+)?(?P<name>[A-Za-z]{2,20})[.!]?\s*$"
)
# `x + 3 coins`, `11 + 3 in one basket`, and before a dash, `6 shells - 3 of them`: words that no sign can follow.
_OPERATION = re.compile(
    r"(?<![\w.,$/^])(?<![-+*/\u00d7\u2212][ \t])\$?(?:[0-9]+(?:[.,][0-9]+)*[a-z]?|[a-z])"
    r"(?:[ \t][-+*/x\u00d7\u2212][ \t]\$?(?:[0-9]+(?:[.,][0-9]+)*[a-z]?|[a-z])){1,9}$"
)
# `8 + 4 eggs`, and no fraction.
_NOT_CARRIED_OUT = re.compile(
    r"(?!\$?[0-9.,]{1,20}[ \t]/[ \t][0-9.,]{1,20}(?:[ \t][a-z]|$))"
    r"\$?[0-9][0-9.,]*(?:[ \t][-+*/x\u00d7\u2212][ \t]\$?[0-9][0-9.,]*){1,9}(?:[ \t][a-z ]{1,80})?"
)
_BEFORE_DASH = re.compile(
    r"(?:(?<![a-zA-Z])(?!(?:is|are|was|be|to|of|and|or|by|at|equals?|gets?|gives?|than|plus|minus|times|have)[ \t])"
    r"[a-zA-Z]{2,}|[)\]])[ \t]+$"
)
YES_OR_NO = re.compile(r"(?i)(?:^|[.!?]\s)(?P<yes>yes|no)(?=[,.!])")
_TWO_WORDS = re.compile(r"[^\W\d_]{1,20}(?:[ -][^\W\d_]{2,20})?[.!]?")
_NUMBER_WORD = re.compile(
    r"(?i)(?:(?<![a-z-])(?:is|are|has|have|makes?|of|get|gives?|takes?|to|=)[ \t](?:exactly |only |just )?|^)"
    rf"(?P<number>{NUMBER_IN_WORDS}|infinitely many)"
)
# `2x = 72 and x = 36`, `b = 4, and ab = 8`: steps, of which only the last value is stated.
_FACTOR = re.compile(r"[0-9)][a-z][ \t]?$")
_STEP = re.compile(r"(?:and|,)[ \t]+[a-z0-9 ]{0,9}[a-z0-9)][ \t]?[-+*/]?[ \t]?[a-z][ \t]?=")


def restated(text: str) -> str:
    """A statement with one of its sayings of one value: `3/4` of `three quarters, i.e. 3/4`."""
    sayings = list(_RESTATED.finditer(text)) if " " in text else None
    if not sayings:
        return text
    if _ONLY_VALUE.match(text, sayings[-1].end()):
        return text[sayings[-1].end() :].rstrip(" .)" if "(" in sayings[-1].group() else " .")
    return text[: sayings[0].start()] or text


def without_asides(text: str) -> str:
    """A text without what stands at its end beside its value: a calculation, a rounding, a condition, a reason."""
    start = max(0, len(text) - 200)
    end = text[start:]
    if " " not in end and end.isascii():
        return text
    # A search costs more than all the others, so what each aside holds is looked for first.
    if " (" in end:
        end = _CALCULATION.sub(r"\1", end)
    if any(map(end.__contains__, _ABOUT)):
        end = _ROUNDED.sub(r"\1", end)
    if "比" in end or "其中" in end:
        end = _COMPARISON.sub("", end)
    cut = _TAKEN_AT.search(end) if _SIGN_OF_VARIABLE.search(end) and any(map(end.__contains__, _CONDITIONS)) else None
    if cut is None and "s " in end and _VARIABLE_AT_END.search(end):
        cut = _COUNTED.search(end)
    if cut is None and any(map(end.__contains__, _REASONS)):
        cut = _REASON.search(end)
    if cut is None and (" in " in end or " of " in end):
        cut = _QUALIFIED.search(end)
    return text[:start] + (end[: cut.end(cut.lastgroup or 0)] if cut else end)


def several_at(text: str, end: int) -> str | None:
    """The tuple or list of numbers that the number which ends there belongs to."""
    start = max(0, end - 120)
    said = text[start:end]
    patterns = (
        _ROWS if "[" in said else None,
        _BRACKETED if any(map(said.__contains__, "([{")) else None,
        _LISTED_NUMBERS if "are" in said else None,
        _RATIO if "ratio" in said else None,
        _EITHER if " or " in said else None,
        _SCIENTIFIC if "\u00d7" in said or "x 10" in said else None,
        _AMOUNTS if _ANOTHER_AMOUNT.search(text, max(0, end - 32), end + 32) else None,
        DATE if _MONTH_NEAR.search(text, max(0, end - 24), end + 16) else None,
    )
    for found in (match for pattern in patterns if pattern for match in pattern.finditer(text, start, end + 60)):
        if found.start() < end <= found.end():
            if found.re is _AMOUNTS:
                amounts = found.group().replace(" and ", " ")
                return amounts if compound_value(amounts) else None
            return found["list"] if "list" in found.re.groupindex else found.group()
    return None


def said_at_end(text: str) -> str | None:
    """The expression without delimiters that the last sentence ends in: `the line is y = 2x + 1`, `AB = 2√5 cm`."""
    stripped = "\n" + text.rstrip()
    start = max(stripped.rfind("\n"), len(stripped) - _LONGEST_EXPRESSION)
    for word in _SAYS.finditer(stripped, start):
        said = _EXPRESSION.fullmatch(stripped, len(stripped) - len(stripped[word.end() :].lstrip(" \t,")))
        # Of `4 = x` the number counts.
        is_step = word.group().startswith("=") and (
            _FACTOR.search(stripped, max(0, word.start() - 4), word.start())
            or (said and (_STEP.search(said["value"]) or re.fullmatch(r"\s*[a-zA-Z]\s*", said["value"])))
        )
        if said and _NO_NUMBER.search(said["value"]) and not is_step:
            if is_denied(stripped, said.start(), said.end("value")):
                return None
            value = said["value"].strip()
            value = value.rpartition("=")[2].strip() if _CALCULATED.fullmatch(value) else value
            return value + unit_at(stripped, said.end("value"))
    return None


def value_at(text: str, number: re.Match[str]) -> str:
    """A number with the operation that ends in it, and without a dash that is no sign."""
    start, end = number.span()
    if operation := _OPERATION.search(text[max(0, end - 80) : end]):
        return operation.group()
    is_spaced = number.group()[:1] in "+-\u2212" and number.group()[1:2].isspace()
    return number.group()[1:] if is_spaced and _BEFORE_DASH.search(text[max(0, start - 30) : start]) else number.group()


def is_carried_out(answer: str) -> bool:
    """Whether it is no operation on numbers, which a policy would learn to say in place of its result."""
    return not _NOT_CARRIED_OUT.fullmatch(answer)


def unit_at(text: str, start: int) -> str:
    """The unit that is named there; empty where there is none: ` mph in all` is ` mph`."""
    words = _WORDS_AFTER.match(text, start)
    return _unit_in(words.group()) if words else ""


@lru_cache(maxsize=4096)
def _unit_in(words: str) -> str:
    named = words.translate(_RAISED).split()
    named = named[: named.index("in", 1)] if "in" in named[1:] else named
    unit = find_unit(" ".join(named)) if named and _may_begin_unit(named[0]) else None
    while unit and len(named) > 1 and (shorter := find_unit(" ".join(named[:-1]))):
        if (shorter.dimensions, shorter.size) != (unit.dimensions, unit.size):
            break
        named.pop()
    return " " + " ".join(named) if unit else ""


@lru_cache(maxsize=4096)
def _may_begin_unit(word: str) -> bool:
    return find_unit(word) is not None or find_unit(f"{word} m") is not None


def word_at_end(text: str) -> str | None:
    """The word that the last sentence ends in, where it is what the sentence says; else its number or `yes`."""
    end = text.rstrip()
    line = end[max(end.rfind("\n") + 1, len(end) - 100) :]
    if _TWO_WORDS.fullmatch(text.strip()) and not _NUMBER_WORD.match(text.strip()):
        return text.strip()
    patterns = (WORD_IN_BOLD, YES_OR_NO, _NUMBER_WORD, NAME_AT_END)
    word = next((found for pattern in patterns if (found := pattern.search(line))), None)
    return (
        None
        if word is None or is_denied(line, word.start(word.lastgroup or 0), len(line))
        else word[word.lastgroup or 0]
    )
