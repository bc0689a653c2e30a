"""One spelling for each sign of an answer: symbols, commands of LaTeX, words that stand for signs."""

from __future__ import annotations

import re
from typing import Final

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
    return trimmed(text)


def trimmed(text: str) -> str:
    """The text without the punctuation around it. A `!` behind a number or name is a factorial."""
    text = text.strip()
    while text and (text[-1] in ".,;:" or text.endswith("\\") or (text[-1] == "!" and not text[-2:-1].isalnum())):
        if text.endswith("\\!") or (text.endswith("!") and text[-2:-1] in ")}]"):
            break
        text = text[:-1].rstrip()
    return text.lstrip(",;:").strip('" ')
