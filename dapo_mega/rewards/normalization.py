"""Bring an answer to a canonical spelling, after the rule of the DAPO recipe.

The public rule also deletes some text that carries meaning (the variable in `\\frac{a b}{2}`, the commas of
the list `3, 5, 7`, everything but the last value of `x=7, y=2`), which would reward wrong answers. Here
articles and units go only where they are words, commas only where they group thousands.
"""

import re
from typing import Final

_CHARACTERS: Final = str.maketrans(
    {
        "−": "-", "–": "-", "﹣": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ",
        "√": "\\sqrt ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "°": "", "∪": "\\cup ", "∈": "\\in ", 
        "±": "\\pm ", "∞": "\\infty ",
        "，": ",", "＝": "=", "＄": "$",
        # Invisible marks: zero-width characters and writing-direction controls.
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2066\u2067\u2068\u2069\ufeff", ""),
        **dict.fromkeys("\u202a\u202b\u202c\u202d\u202e\u061c", ""),
    }
)  # fmt: skip

_UNITS = (
    "square|ways|integers|dollars|cents|mph|inches|inch|ft|feet|foot|hours|hour|days|minutes|seconds|km|cm|gm|kg"
    "|units|points|digits|degrees|degree|pounds|meters|meals|edges|students|childrentickets|multiples|percent"
)
_MATH_DELIMITER = re.compile(r"(?<!\\)\\[\[\]()]|\$+")
_SEPARATORS = re.compile(r"(?:\s|[,;=&.]|and\b|or\b)*")
_TOUCHING_FACTOR = re.compile(r"[0-9)}+\-*/^]$")
# Applied in this order; each pattern is anchored on a literal or on single characters, so all are linear.
_REWRITES: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|bigl|bigr|big|Bigl|Bigr|displaystyle|ldots|dots)(?![a-zA-Z])", ""),
        (r",\s?\\!\s*", ","),
        (r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\?%|\^\s*\\circ(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (
            r"\\(?:mbox|mathrm|textbf|textit|textrm|mathbf|operatorname)(?=\s*\{)|\\overline(?=\s*\{\s*[A-Z]{2})",
            r"\\text",
        ),
        (r"\{,\}", ","),
        (r"\*\*", "^"),
        (r"\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
        (r"(?<=[0-9})])\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:\{[23]\}|[23]))?$", ""),
        (r"\\text\s*\{([^{}]*)\}", r"\1"),
        (r"(?i)(?<![a-z\\])(?:an?|the)\s+(?=[a-z]{2})", ""),
        (rf"(?<=[0-9])\s*(?:{_UNITS})(?![a-zA-Z])", ""),
        (r"\\frac\s*([0-9])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s+([a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r",(?:\s*,)+", ","),
    )
)
# The whole answer, or all that follows an equals sign: elsewhere commas separate.
_THOUSANDS = re.compile(r"(?:^|=)\s*[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?$")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_MEMBERSHIP = re.compile(r"[a-zA-Z]\s*\\in(?![a-zA-Z])")


def _unwrap_math(text: str) -> str:
    """Content of `$...$` (or its LaTeX synonyms): the first one, as in DAPO, or all of a list of them."""
    text = _MATH_DELIMITER.sub("$", text.replace("\\$", ""))
    pieces = text.split("$")
    outside, inside = pieces[0::2], pieces[1::2]
    if len(pieces) < 3 or all(_SEPARATORS.fullmatch(piece) for piece in outside):
        return "".join(pieces)
    for index in range(len(outside) - 2, -1, -1):
        _, equals, _ = outside[index].rpartition("=")
        if equals and inside[index]:
            return inside[index]
    # `2$\sqrt{3}$`: the number outside belongs to the value.
    if any(_TOUCHING_FACTOR.search(piece.rstrip()) for piece in outside[:-1]):
        return "".join(pieces)
    return next((piece for piece in inside if piece.strip()), "".join(pieces))


def closing_brace(text: str, opening: int) -> int:
    """Where the brace at `opening` closes; -1 if nowhere. Escaped braces do not count."""
    depth = 0
    for brace in _BRACES.finditer(text, opening):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return brace.start()
    return -1


def canonical_latex(text: str) -> str:
    r"""The answer without delimiters, text commands, articles, units and shorthand; spaces are kept.

    `\frac12` becomes `\frac{1}{2}`, `\sqrt3` becomes `\sqrt{3}`, `58,500 dollars` becomes `58500`.
    """
    text = text.translate(_CHARACTERS).strip().strip("*").strip()
    text = _unwrap_math(text)
    if (box := text.rfind("\\boxed{")) >= 0 and (close := closing_brace(text, box + len("\\boxed"))) >= 0:
        text = text[box + len("\\boxed{") : close]
    text = text.strip().strip("*").rstrip().rstrip(".,;:")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").strip('" ')
    text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    if match := _CHOICE.fullmatch(text):
        text = match[1]
    if match := _MEMBERSHIP.match(text):
        text = text[match.end() :]
    return text.strip()


def compact(text: str) -> str:
    """The text without any white space."""
    return "".join(text.split())
