r"""Reads an answer as what it is in mathematics: a value, a list, a tuple or interval, a set, a matrix, a relation.

Reading is a matter of spelling alone and takes at most quadratic time in the length of the text, which the caller
bounds. A text that has more than one sensible reading (`1,5` is a decimal to some and a list to others) is given all.
"""

import re
from collections.abc import Iterator
from typing import Final

from dapo_mega.rewards.bounds import MAX_NESTING
from dapo_mega.rewards.nodes import Items, Matrix, Named, Node, Ratio, Relation, Union, Value
from dapo_mega.rewards.normalization import compact
from dapo_mega.rewards.prose import restated
from dapo_mega.rewards.signs import clean, trimmed
from dapo_mega.rewards.single_values import compound_value, single_value

_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv)(?![a-zA-Z])|(?<![<>!:])=+|[<>]")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\s*\{[clr|\s]*\})?(.*)\\end\{\1\}", re.DOTALL)
_OPENERS, _CLOSERS = "([{", ")]}"

# A quantity that is only named: |AB|, f(x), V_1 : V_2, \angle ABC, but not x + y, 2x or x^2.
_QUANTITY = re.compile(
    r"(?:[a-zA-Z|'():/,\s{}]|\\(?!pm|mp|sqrt|cdot|times|int|sum|prod|le|ge|in\b)[a-zA-Z]+(?![a-zA-Z])"
    r"|_\s*(?:\{[^{}]*\}|[a-zA-Z0-9])|\(\s*-?[0-9]{1,3}\s*\)|\\[{}%|])+"
)
_LETTER = re.compile(
    r"(?:\\text\s*\{\s*)?(?:(?i:option|choice|answer)\s+)?[(\[]?\s*(?P<letter>[A-J])\s*[)\]]?\s*[.:]?\s*\}?"
)
_LABEL = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\((?P<bracketed>[A-J])\)|(?P<plain>[A-J])(?:[.:)](?=[\s}\\])|\)))\s*\}?[\s:.\\]*(?P<rest>\S.*)",
    re.DOTALL,
)
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}|\\text")
_BOTH_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_COMMA_DECIMAL = re.compile(r"(?P<whole>[+-]?[0-9.]*[0-9]),(?P<part>[0-9]+)(?![0-9,]*,[0-9])")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")


_TIME = re.compile(
    r"(?P<hour>[01]?[0-9]|2[0-4])(?::(?P<minute>[0-5][0-9]))?(?::(?P<second>[0-5][0-9]))?"
    r"(?:\s*(?:\\text\s*\{\s*)?(?P<half>[aApP])\.?\s?[mM]\.?\s*\}?)?"
)


def readings(text: str) -> tuple[Node, ...]:
    """All sensible readings of an answer, the likeliest first; none of a text without letter or digit."""
    latex = clean(restated(text))
    found: dict[Node, None] = {}
    for spelling in _spellings(latex):
        node = _read(spelling, 0)
        if node is not None:
            found.setdefault(node)
    if (sum_of_parts := compound_value(latex)) is not None:
        found.setdefault(sum_of_parts)
    return tuple(found)


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
    text = trimmed(text)
    if depth > MAX_NESTING or not any(character.isalnum() for character in text):
        return None
    # Braces that are not escaped show nothing: `{1, 3}` is read as `1, 3`.
    while text.startswith("{") and text.endswith("}") and not text.endswith("\\}") and _closes(text) == len(text) - 1:
        text = text[1:-1].strip()
    text = text[1:].strip() if text.startswith("{") and _closes(text) < 0 else text
    for separators in (";", ","):
        parts = [part for part in _split(text, separators) if part.strip()]
        if len(parts) > 1:
            return _list(parts, depth)
    if len(united := _split_command(text, "\\cup")) > 1 or len(united := _split_command(text, "\\bigcup")) > 1:
        return Union(items) if (items := _read_all(united, depth)) else None
    signs = [match for match in _RELATION.finditer(text) if not _inside_brackets(text, match.start())]
    if signs:
        return _relation(text, signs, depth)
    if bracketed := _bracketed(text, depth):
        return bracketed
    if (matrix := _MATRIX.fullmatch(text)) is not None and "\\begin" not in matrix[2]:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\hline", matrix[2]) if row.strip()]
        read = tuple(cells for row in rows if (cells := _read_all(row.split("&"), depth)))
        return Matrix(read) if read and len(read) == len(rows) else None
    if _BOTH_SIGNS.search(text):
        upper = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", text))
        lower = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", text))
        return _list([upper.lstrip("+ "), lower.lstrip("+ ")], depth)
    return _choice(text, depth) or _ratio(text, depth) or single_value(text, depth)


def _read_all(parts: list[str], depth: int) -> tuple[Node, ...] | None:
    """What each of the parts is; None if one of them is nothing."""
    read = tuple(node for part in parts if (node := _read(part, depth + 1)) is not None)
    return read if len(read) == len(parts) else None


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
    items = _read_all(parts, depth)
    return Items("", "", _spread(items, parts)) if items else None


def _spread(items: tuple[Node, ...], parts: list[str]) -> tuple[Node, ...]:
    """The values of a list, both of each `\\pm`: `\\pm 1, \\pm 3` are four."""
    spread: list[Node] = []
    for item, part in zip(items, parts, strict=True):
        value = item.value if isinstance(item, Named) else item
        if isinstance(value, Items) and value.is_list and _BOTH_SIGNS.search(part):
            spread += [Named(item.name, one, item.text) if isinstance(item, Named) else one for one in value.items]
        else:
            spread.append(item)
    return tuple(spread)


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
    items = _read_all(parts, depth)
    if items and opening == "\\{":
        items = _spread(items, parts)
    rows = [
        item.items for item in items or () if isinstance(item, Items) and item.opening == "[" and item.closing == "]"
    ]
    if items and len(rows) == len(items) and (opening, closing) == ("[", "]"):
        return Matrix(tuple(rows))
    return Items(opening, closing, items) if items else None


def _relation(text: str, signs: list[re.Match[str]], depth: int) -> Node | None:
    cuts = [0, *(position for match in signs for position in match.span()), len(text)]
    sides = tuple(text[cuts[i] : cuts[i + 1]].strip() for i in range(0, len(cuts), 2))
    kinds = tuple("=" if match.group().startswith(("=", "\\equiv")) else match.group() for match in signs)
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
    if (
        kinds[last - 1] == "="
        and _is_variable(sides[last])
        and sides[last] not in ("e", "i")
        and _is_number(sides[last - 1])
    ):
        # `10 = b`
        return Named(sides[last], turned, text) if (turned := _read(sides[last - 1], depth + 1)) else None
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


def _ratio(text: str, depth: int) -> Ratio | None:
    time = _TIME.fullmatch(text)
    half = (time["half"] or "").casefold() if time else ""
    parts = [part.strip() for part in _split(text, ":")]
    if len(parts) == 1 and not half:
        return None
    if not half and (
        not all(parts)
        or any(_WORDS.search(part) for part in parts)
        or len(parts[0]) == 1 != len(parts[-1]) == parts[0].isalpha()
    ):
        return None
    seconds = None
    if time and (half or (time["minute"] and not time["second"])):
        hour = int(time["hour"])
        hour = hour % 12 + 12 * (half == "p") if half else hour
        seconds = 3600 * hour + 60 * int(time["minute"] or 0) + int(time["second"] or 0)
        half = half or ("" if 0 < hour <= 12 else "a" if hour < 12 else "p")
    items = () if half and len(parts) == 1 else _read_all(parts, depth)
    return Ratio(items, seconds, half, text) if items is not None else None


def _choice(text: str, depth: int) -> Node | None:
    text = text.strip()
    if match := _LETTER.fullmatch(text):
        return Value(text, match["letter"], letter=match["letter"])
    label = _LABEL.fullmatch(text)
    if label is None:
        return None
    named = _read(label["rest"], depth + 1) if depth < MAX_NESTING else None
    return Value(text, compact(text), letter=label["bracketed"] or label["plain"], named=named)
