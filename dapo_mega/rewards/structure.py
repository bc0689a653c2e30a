r"""Reads an answer as what it is in mathematics: a value, a list, a tuple or interval, a set, a matrix, a relation.

Reading is a matter of spelling alone and takes time linear in the text, whose length the caller bounds. A text that has
more than one sensible reading (`1,5` is a decimal to some and a list to others) is given all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dapo_mega.rewards.bounds import MAX_NESTING
from dapo_mega.rewards.normalization import canonical_latex, compact
from dapo_mega.rewards.numerals import Numeral, parse_numeral
from dapo_mega.rewards.units import Unit, find_unit


@dataclass(frozen=True)
class Value:
    """A single value. `text` is its LaTeX without unit, percent sign and words around it, `key` its canonical spelling.

    `letter` is that of the choice which it names, `named` what stands beside the letter.
    """

    text: str
    key: str
    numeral: Numeral | None = None
    is_percent: bool = False
    unit: Unit | None = None
    is_word: bool = False
    letter: str | None = None
    named: Node | None = None


@dataclass(frozen=True)
class Named:
    """`name = value`; `text` is the whole equation."""

    name: str
    value: Node
    text: str


@dataclass(frozen=True)
class Items:
    """Several values: a list without brackets, or what stands between `opening` and `closing`."""

    opening: str
    closing: str
    items: tuple[Node, ...]

    @property
    def is_list(self) -> bool:
        return not self.opening

    @property
    def is_set(self) -> bool:
        return self.opening == "\\{"


@dataclass(frozen=True)
class Union:
    """Sets or intervals, united."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix, as its rows."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality that is not merely a named value or an interval."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]
    text: str


Node = Value | Named | Items | Union | Matrix | Relation

_SYMBOLS: Final = str.maketrans(
    {
        "°": "^{\\circ}", "²": "^{2}", "³": "^{3}", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}",
        "≈": "\\approx ", "⁄": "/", "∶": ":", "：": ":", "；": ";", "（": "(", "）": ")", "、": ",", "∞": "\\infty ",
        "−": "-", "–": "-", "﹣": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "√": "\\sqrt ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∈": "\\in ", "±": "\\pm ", "，": ",", "＝": "=",
        "＄": "\\$", "€": "\\$", "£": "\\$", "¥": "\\$", "₹": "\\$", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2066\u2067\u2068\u2069\ufeff", ""),
        **dict.fromkeys("\u202a\u202b\u202c\u202d\u202e\u061c", ""),
    }
)  # fmt: skip

_ENVIRONMENT = re.compile(
    r"\\begin\{(?:cases|aligned|align\*?|gathered|split)\}|\\end\{(?:cases|aligned|align\*?|gathered|split)\}"
)
_REWRITES: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\boxed\s*(?=\{)|\\fbox\s*(?=\{)", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|ldots|dots|cdots)(?![a-zA-Z])\.?", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (
            r"\\(?:mbox|mathrm|mathit|mathsf|textbf|textit|textrm|textnormal|mathbf|boldsymbol|operatorname\*?)\s*(?=\{)",
            r"\\text",
        ),
        (r"\\(?:overline|underline)\s*(?=\{\s*\))", ""),
        (r"\\text\s*\{\s*\}", ""),
        (r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=[0-9]{3}(?![0-9]))|(?<=[0-9]),\\!\s*(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<=[0-9])\\[,;: !]\s?(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=[0-9])", "."),
        (r"(?<=[0-9])\{\s*\.\s*\}(?=[0-9])", "."),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad|~|\\thinspace(?![a-zA-Z])|\\hspace\s*\{[^{}]*\}", " "),
        (r"\\(?:leqslant|leqq|leq|le)(?![a-zA-Z])|<=|=<", r"\\le "),
        (r"\\(?:geqslant|geqq|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=|\\not\s*=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:simeq|approxeq|thickapprox)(?![a-zA-Z])", r"\\approx "),
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\varnothing(?![a-zA-Z])|∅|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (
            r"\\mathbb\s*\{?\s*R\s*\}?(?![\^_*a-zA-Z])|\\R(?![a-zA-Z])|\\text\s*\{\s*[Aa]ll reals?(?: numbers?)?\s*\}",
            r"(-\\infty,\\infty)",
        ),
        (r"\+\s*\\infty", r"\\infty "),
        (r"(?<![a-zA-Z\\])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
        (r"\\%", "%"),
        (
            r"%?\s*\\text\s*\{\s*(?:percent|pct|percentage|%)\s*\}|%?\s*(?<![a-zA-Z])(?:percent|pct|percentage)(?![a-zA-Z])",
            "%",
        ),
        (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", r"\\text{degrees}"),
        (
            r"\\text\s*\{([^{}]*?\S)\s+(?:and|or)\s+([^{}]*)\}|\\text\s*\{([^{}]*?\S)\s+(?:and|or)\s*\}",
            r"\\text{\1\3},\\text{\2}",
        ),
        (r"\\text\s*\{\s*\}", ""),
        (r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
        (r"(?<=[0-9})\]])or(?=[a-zA-Z(\\])", ","),
        (r",(?:\s*,)+", ","),
    )
)
_POWER = re.compile(r"(?<=[a-zA-Z0-9)}])\*\*(?=[a-zA-Z0-9({\-])")
_DOUBLED_COMMAND = re.compile(r"\\\\(?=[a-zA-Z%$])")
_HAS_ROWS = re.compile(r"matrix|array|cases|align|split|gather")
_DOLLAR = re.compile(r"(?<!\\)\$+|(?<!\\)\\[()\[\]]")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv)(?![a-zA-Z])|(?<![<>!:])=+|[<>]")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\s*\{[clr|\s]*\})?(.*)\\end\{\1\}", re.DOTALL)
_OPENERS, _CLOSERS = "([{", ")]}"
_CURRENCY = "\\$"

# A quantity that is only named: |AB|, f(x), V_1 : V_2, \angle ABC, but not x + y, 2x or x^2.
_QUANTITY = re.compile(
    r"(?:[a-zA-Z|'():/,\s{}]|\\(?!pm|mp|sqrt|cdot|times|int|sum|prod|le|ge|in\b)[a-zA-Z]+(?![a-zA-Z])"
    r"|_\s*(?:\{[^{}]*\}|[a-zA-Z0-9])|\(\s*-?[0-9]{1,3}\s*\)|\\[{}%|])+"
)
_LETTER = re.compile(r"(?:\\text\s*\{\s*)?[(\[]?\s*(?P<letter>[A-J])\s*[)\]]?\s*[.:]?\s*\}?")
_LABEL = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\((?P<bracketed>[A-J])\)|(?P<plain>[A-J])(?:[.:)](?=[\s}\\])|\)))\s*\}?[\s:.\\]*(?P<rest>\S.*)",
    re.DOTALL,
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_BOTH_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_UNIT_TOKEN = re.compile(
    r"(?P<word>\\text\s*\{[^{}]*\}|(?<![\\a-zA-Z])[a-zA-Z][a-zA-Z.'\-]*)|(?P<between>[/.\-\s]|\\cdot(?![a-zA-Z]))"
    r"|(?P<power>\^\s*(?:\{\s*-?[1-3]\s*\}|-?[1-3]))|(?P<other>\\[a-zA-Z]+|.)",
    re.DOTALL,
)
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_AMOUNT = re.compile(r"(?<![a-zA-Z0-9_])[0-9]+(?:[.,][0-9]+)*")
_NEGATION = re.compile(
    r"(?i)(?<![a-z])(?:not|no|never|n't|neither|nor|except|than|least|most|between|over|under|maybe|perhaps|either|if|unless|to"
    r"|unknown|any|other)(?![a-z])"
)
_PLAIN_WORDS = re.compile(r"[a-zA-Z][a-zA-Z'\-.]*(?:[ /][a-zA-Z][a-zA-Z'\-.]*)*")
_NUMBER_WORDS: Final = {
    word: value
    for value, word in enumerate(
        (
            *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
            *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
            "twenty",
        )
    )
}
_COMMA_DECIMAL = re.compile(r"(?P<whole>[+-]?[0-9.]*[0-9]),(?P<part>[0-9]+)(?![0-9,]*,[0-9])")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_BASE = re.compile(r"[0-9A-F]+_\{?(?:\\text\{)?(?P<base>[0-9a-z]+)\}*")
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


def readings(text: str) -> tuple[Node, ...]:
    """All sensible readings of an answer, the likeliest first; none of a text without letter or digit."""
    latex = clean(text)
    found: dict[Node, None] = {}
    for spelling in _spellings(latex):
        node = _read(spelling, 0)
        if node is not None:
            found.setdefault(node)
    return tuple(found)


def clean(text: str) -> str:
    """The answer with one spelling per sign, without math delimiters, spacing and layout."""
    text = _POWER.sub("^", text.translate(_SYMBOLS)).replace("**", " ").strip().strip("*`").strip()
    if not _HAS_ROWS.search(text):
        text = _DOUBLED_COMMAND.sub(r"\\", text)
    else:
        text = _ENVIRONMENT.sub(" ", text) if _ENVIRONMENT.search(text) and "matrix" not in text else text
        if "matrix" not in text and "array" not in text:
            text = text.replace("\\\\", ",").replace("&", " ")
    text = _DOLLAR.sub(" ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _trimmed(text)


def _trimmed(text: str) -> str:
    """Without the punctuation around it. A `!` behind a number or name is a factorial."""
    text = text.strip()
    while text and (text[-1] in ".,;:" or text.endswith("\\") or (text[-1] == "!" and not text[-2:-1].isalnum())):
        if text.endswith("\\!") or (text.endswith("!") and text[-2:-1] in ")}]"):
            break
        text = text[:-1].rstrip()
    return text.lstrip(",;:").strip('" ')


def _spellings(latex: str) -> Iterator[str]:
    """The text, with its commas read as separators, as marks of thousands and as decimal signs."""
    joined = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), latex)
    if joined != latex and not any(bracket in latex for bracket in "([{"):
        yield joined
    if (
        latex.count(",") == 1
        and (decimal := _COMMA_DECIMAL.search(latex))
        and not _inside_brackets(latex, decimal.start())
    ):
        whole, part = decimal["whole"], decimal["part"]
        if len(part) != 3 or whole.lstrip("+-") in ("0", "00") or len(whole.lstrip("+-")) > 3 or "." in whole:
            yield latex[: decimal.start()] + whole.replace(".", "") + "." + part + latex[decimal.end() :]
    yield latex
    if ";" in latex and "," in latex:
        decimals = re.sub(r"(?<=[0-9]),(?=[0-9])", ".", latex)
        if decimals != latex:
            yield decimals


def _inside_brackets(text: str, position: int) -> bool:
    before = text[:position]
    return sum(before.count(mark) for mark in _OPENERS) > sum(before.count(mark) for mark in _CLOSERS)


def _read(text: str, depth: int) -> Node | None:
    text = _trimmed(text)
    if depth > MAX_NESTING or not any(character.isalnum() for character in text):
        return None
    # Braces that are not escaped show nothing: `{1, 3}` is read as `1, 3`.
    text = _without_braces(text)
    for separators in (";", ","):
        parts = [part for part in _split(text, separators) if part.strip()]
        if len(parts) > 1:
            return _list(parts, depth)
    if len(united := _split_command(text, "\\cup")) > 1 or len(united := _split_command(text, "\\bigcup")) > 1:
        return _all(Union, [_read(part, depth + 1) for part in united])
    signs = [match for match in _RELATION.finditer(text) if not _inside_brackets(text, match.start())]
    if signs:
        return _relation(text, signs, depth)
    if bracketed := _bracketed(text, depth):
        return bracketed
    if (matrix := _MATRIX.fullmatch(text)) is not None and "\\begin" not in matrix[2]:
        return _matrix(matrix[2], depth)
    if _BOTH_SIGNS.search(text):
        return _both_signs(text, depth)
    return _value(text, depth)


def _all(kind: type[Union], nodes: list[Node | None]) -> Node | None:
    items = tuple(node for node in nodes if node is not None)
    return kind(items) if len(items) == len(nodes) else None


def _without_braces(text: str) -> str:
    while text.startswith("{") and text.endswith("}") and not text.endswith("\\}") and _closes(text) == len(text) - 1:
        text = text[1:-1].strip()
    return text[1:].strip() if text.startswith("{") and _closes(text) < 0 else text


def _closes(text: str) -> int:
    """Where the bracket that opens the text closes; -1 if nowhere."""
    depth = 0
    for position, character in enumerate(text):
        if character in _OPENERS:
            depth += 1
        elif character in _CLOSERS:
            depth -= 1
            if depth == 0:
                return position
    return -1


def _split(text: str, separators: str) -> list[str]:
    """Parts between separators that stand outside of all brackets and environments."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in _OPENERS:
            depth += 1
        elif character in _CLOSERS:
            depth -= 1
        elif character == "\\" and text.startswith(("\\begin", "\\end"), position):
            depth += 1 if text.startswith("\\begin", position) else -1
        elif character in separators and depth <= 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _split_command(text: str, command: str) -> list[str]:
    parts: list[str] = []
    start = 0
    for match in re.finditer(re.escape(command) + r"(?![a-zA-Z])", text):
        if not _inside_brackets(text, match.start()):
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _list(parts: list[str], depth: int) -> Node | None:
    items = [_read(part, depth + 1) for part in parts]
    read = tuple(item for item in items if item is not None)
    if len(read) != len(items) or not read:
        return None
    return read[0] if len(read) == 1 else Items("", "", read)


def _bracketed(text: str, depth: int) -> Node | None:
    opening = "\\{" if text.startswith("\\{") else text[0]
    closing = "\\}" if text.endswith("\\}") else text[-1]
    if opening not in ("(", "[", "\\{") or closing not in (")", "]", "\\}"):
        return None
    # An escaped brace counts as its brace.
    plain = text.replace("\\{", "{").replace("\\}", "}")
    if _closes(plain) != len(plain) - 1 or (opening == "\\{") != (closing == "\\}"):
        return None
    inner = text[len(opening) : -len(closing)].strip()
    if opening == "\\{":
        for bar in ("\\mid", "|", ":"):
            _, found, condition = inner.partition(bar)
            if found:
                return _read(condition, depth + 1)
    parts = _split(inner, ",;")
    if len(parts) == 1 and opening == "(":
        return _read(inner, depth + 1) if not re.fullmatch(r"[A-Za-z]", inner) else None
    if len(parts) == 1 and opening == "[":
        return _read(inner, depth + 1) if _MATRIX.fullmatch(inner) else None
    items = [_read(part, depth + 1) for part in parts]
    read = tuple(item for item in items if item is not None)
    return Items(opening, closing, read) if len(read) == len(items) else None


def _matrix(body: str, depth: int) -> Node | None:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\hline", body) if row.strip()]
    cells = [[_read(cell, depth + 1) for cell in row.split("&")] for row in rows]
    read = tuple(tuple(cell for cell in row if cell is not None) for row in cells)
    return Matrix(read) if read and all(len(a) == len(b) for a, b in zip(read, cells, strict=True)) else None


def _both_signs(text: str, depth: int) -> Node | None:
    upper = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", text))
    lower = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", text))
    return _list([upper.lstrip("+ "), lower.lstrip("+ ")], depth)


def _relation(text: str, signs: list[re.Match[str]], depth: int) -> Node | None:
    cuts = [0, *(position for match in signs for position in match.span()), len(text)]
    sides = tuple(text[cuts[i] : cuts[i + 1]].strip() for i in range(0, len(cuts), 2))
    kinds = tuple("=" if match.group().startswith("=") else match.group() for match in signs)
    if all(kind in ("=", "\\approx", "\\in") for kind in kinds):
        return _equation(sides, kinds, text, depth)
    if interval := _interval(sides, kinds, depth):
        return interval
    return Relation(sides, kinds, text)


def _equation(sides: tuple[str, ...], kinds: tuple[str, ...], text: str, depth: int) -> Node | None:
    # Of `x = \sqrt{2} \approx 1.41` the exact value counts.
    last = len(sides) - 1
    while last > 0 and kinds[last - 1] == "\\approx" and not _QUANTITY.fullmatch(sides[last - 1]):
        last -= 1
    value = _read(sides[last], depth + 1)
    if value is None:
        return None
    if last == 0:
        return value
    left = sides[0]
    if _QUANTITY.fullmatch(left) or "\\in" in kinds or (_is_number(left) and _is_number(sides[last])):
        return Named(compact(left), value, text)
    return Relation(sides[: last + 1], kinds[:last], text)


def _is_number(text: str) -> bool:
    return re.search(r"(?<!\\)[a-zA-Z](?![a-zA-Z]*\{)", re.sub(r"\\[a-zA-Z]+", "", text)) is None


_FLIPPED: Final = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def _interval(sides: tuple[str, ...], kinds: tuple[str, ...], depth: int) -> Node | None:
    """`a < x \\le b`, `x > a`: the interval of the values that the variable may take."""
    if len(sides) == 3 and _is_variable(sides[1]):
        if kinds[0] in (">", "\\ge") and kinds[1] in (">", "\\ge"):
            sides, kinds = sides[::-1], (_FLIPPED[kinds[1]], _FLIPPED[kinds[0]])
        if kinds[0] not in ("<", "\\le") or kinds[1] not in ("<", "\\le"):
            return None
        ends = _read(sides[0], depth + 1), _read(sides[2], depth + 1)
        if ends[0] is None or ends[1] is None:
            return None
        return Items("(" if kinds[0] == "<" else "[", ")" if kinds[1] == "<" else "]", (ends[0], ends[1]))
    if len(sides) != 2 or kinds[0] not in _FLIPPED:
        return None
    left, right, kind = sides[0], sides[1], kinds[0]
    if left.startswith("-") and _is_variable(left[1:].strip()) and not re.search(r"[+\-]", right[1:]):
        left, right, kind = left[1:].strip(), right[1:] if right.startswith("-") else f"-{right}", _FLIPPED[kind]
    if _is_variable(right) and not _is_variable(left):
        left, right, kind = right, left, _FLIPPED[kind]
    if not _is_variable(left) or (end := _read(right, depth + 1)) is None:
        return None
    infinity = Value("\\infty", "\\infty")
    if kind in ("<", "\\le"):
        return Items("(", ")" if kind == "<" else "]", (Value("-\\infty", "-\\infty"), end))
    return Items("(" if kind == ">" else "[", ")", (end, infinity))


def _is_variable(text: str) -> bool:
    return re.fullmatch(r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\{\w+\}|\w))?(?:\([a-zA-Z]\))?", text) is not None


# Single values.


def variables(value: Value) -> frozenset[str] | None:
    """The letters that a value is an expression in, but for e and i; None where a letter may be bound or a word."""
    if _BINDING.search(value.text):
        return None
    return frozenset(_VARIABLE.findall(_NO_VARIABLE.sub(" ", value.text))) - {"e", "i"}


def base(value: Value) -> str | None:
    """The base that a number names: 3 of `1112122_3`."""
    match = _BASE.fullmatch(value.key)
    return match["base"] if match else None


def _value(text: str, depth: int) -> Node | None:
    if choice := _choice(text, depth):
        return choice
    currency = find_unit("dollars") if _CURRENCY in text else None
    core, unit = _unit(text.replace(_CURRENCY, " ").strip())
    core = _SPACED.sub(lambda number: number.group().replace(" ", ""), core)
    is_percent = core.endswith("%")
    core = core.rstrip("% ").strip()
    if mixed := _MIXED.fullmatch(core):
        core = f"{mixed['sign']}{mixed['whole']}\\frac{{{mixed['top']}}}{{{mixed['bottom']}}}"
    canonical = canonical_latex(core)
    key = compact(canonical)
    if not key:
        return None
    if (number := _NUMBER_WORDS.get(key.casefold())) is not None:
        key = str(number)
    numeral = parse_numeral(key)
    if numeral is None and (single := _single_amount(core, depth)) is not None:
        return single
    is_word = key.isalpha() and (len(key) >= 4 or "\\text" in text or key.casefold() in ("yes", "no"))
    return Value(
        canonical, key, numeral, is_percent, unit or currency, is_word or (" " in canonical and _is_prose(canonical))
    )


def _is_prose(text: str) -> bool:
    return len(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}", text)) >= 2 and "\\" not in text


def _choice(text: str, depth: int) -> Node | None:
    text = text.strip()
    if match := _LETTER.fullmatch(text):
        return Value(text, match["letter"], letter=match["letter"])
    label = _LABEL.fullmatch(text)
    if label is None:
        return None
    named = _read(label["rest"], depth + 1) if depth < MAX_NESTING else None
    return Value(text, compact(text), letter=label["bracketed"] or label["plain"], named=named)


def _unit(text: str) -> tuple[str, Unit | None]:
    """The text without the unit or words that follow its number, and the unit."""
    cut = _units_start(text)
    core, words = text[:cut].rstrip(), text[cut:]
    if not words.strip() or not (core.endswith("\\pi") or (core and core[-1] in "0123456789})%")):
        return text, None
    plain = _TEXT.sub(r" \1 ", words)
    if _NEGATION.search(plain) or len(plain.split()) > 8:
        return text, None
    is_text = "\\text" in words
    unit = find_unit(plain)
    bare = plain.strip(" .")
    is_letter = unit is not None and len(unit.name) == 1
    is_apart = text[len(core)] == " " and "^" not in plain
    if not is_text and (is_letter or (unit is None and len(bare) <= 2)) and not (unit is not None and is_apart):
        return text, None  # `5m`, `3s^2`, `2ab`: variables.
    if not is_text and unit is None and not re.search(r"[a-zA-Z]{3,}", plain):
        return text, None
    if not is_text and re.search(r"\\(?:sin|cos|tan|log|ln|sqrt)", words):
        return text, None
    return core, unit


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


def _single_amount(text: str, depth: int) -> Node | None:
    """The one number of a phrase: `about 5`, `she has 18 left`."""
    words = _TEXT.sub(r"\1", text)
    if "\\" in words or not re.search(r"[a-zA-Z]{3,}", words) or _NEGATION.search(words) or len(words) > 120:
        return None
    amounts = _AMOUNT.findall(words)
    if len(amounts) != 1 or re.search(r"[a-zA-Z0-9]\s*[\^*/+_]|[\^*/+_]\s*[a-zA-Z0-9(]|[(){}]", words):
        return None
    start = words.index(amounts[0])
    sign = "-" if words[:start].rstrip().endswith("-") and not re.search(r"[a-zA-Z]-$", words[:start].rstrip()) else ""
    core, unit = _unit(sign + words[start:])
    if not re.fullmatch(r"-?[0-9.,]+%?", core.strip()):
        return None
    return _value(core if unit is None else f"{core}\\text{{ {unit.name}}}", depth + 1) if depth < MAX_NESTING else None
