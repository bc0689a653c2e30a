"""One spelling for each sign of an answer: symbols, commands of LaTeX, words that stand for signs."""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import Final

# Full-width, Arabic, Persian, Devanagari, Bengali, Thai.
OTHER_DIGITS: Final = {
    chr(zero + digit): str(digit) for zero in (0xFF10, 0x660, 0x6F0, 0x966, 0x9E6, 0xE50) for digit in range(10)
}
PARTS_OF_ONE: Final = re.compile("[\u00bc-\u00be\u2150-\u215e]")
"""Fractions that are one sign."""
_RAISED: Final = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_POWERS = re.compile(f"[{_RAISED}]+")
_ROOT = re.compile(r"([√∛])\s*(?:([0-9]+(?:\.[0-9]+)?|[a-zA-Z])|\(([^()]*)\))")
_LOWERED = re.compile("[₀-₉]+")
_LETTERS_OF_MATHEMATICS = re.compile("[\U0001d400-\U0001d7ff]+")
_SYMBOLS: Final = str.maketrans(
    {
        **{chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)},
        **OTHER_DIGITS,
        "°": "^{\\circ}",
        "≈": "\\approx ", "⁄": "/", "∶": ":", "、": ",", "≡": "\\equiv ", "万": " myriad ", "亿": " hundred million ",
        "∞": "\\infty ", "或": ",",
        "−": "-", "–": "-", "﹣": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "√": "\\sqrt ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∈": "\\in ", "±": "\\pm ",
        "…": "\\ldots ", "¢": "\\text{ cents}",
        "＄": "\\$", "￥": "¥", "￡": "£", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2066\u2067\u2068\u2069\ufeff", ""),
        **dict.fromkeys("\u202a\u202b\u202c\u202d\u202e\u061c", ""),
    }
)  # fmt: skip

_ENVIRONMENT = re.compile(
    r"\\begin\{(?:cases|aligned|align\*?|gathered|split)\}|\\end\{(?:cases|aligned|align\*?|gathered|split)\}"
)
_REALS_WITHOUT = r"\(-\\infty,\\infty\)\s*(?:\\setminus|\\backslash|\\smallsetminus)\s*"
_REWRITES: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\boxed\s*(?=\{)|\\fbox\s*(?=\{)", ""),
        (
            r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:colorbox\s*\{[^{}]*\}|underline|uline)\s*(?=\{[^{})])"
            r"|\\(?:tiny|small|large|Large|LARGE|huge|Huge|bf|rm|it)(?![a-zA-Z])",
            "",
        ),
        (r"(?<![0-9a-zA-Z])\{?\s*([0-9]+|[a-zA-Z])\s*\\over(?![a-zA-Z])\s*([0-9]+|[a-zA-Z])\s*\}?", r"\\frac{\1}{\2}"),
        (
            r"(?i)^(?:\\text\{\s*)?all\s+(?:real\s+)?(?:numbers?|values?)?\s*(?:of\s+)?[a-z]?\s*"
            r"(?:such that|for which|with|where|satisfying)\s*\}?\s+(?=\S)",
            "",
        ),
        (r",?\s*(?:\\text\s*\{\s*)?for (?:all|any|every|each) (?:real )?(?:numbers? )?\}?\s*\$?\s*[a-z]\s*\}?$", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|ldots|dots|cdots)(?![a-zA-Z])\.?", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        # Functions and signs in plain letters; degrees in a function; powers of ten.
        (r"(?<![\\a-zA-Z])(pi|sqrt|(?:arc)?(?:sin|cos|tan)|cot|log|ln|(?:exp|sec|csc)(?=\s*\())(?![a-zA-Z])", r"\\\1 "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\log\s*_\s*(?:\{\s*e\s*\}|e(?![a-zA-Z]))", r"\\ln "),
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*(?:[0-9]|\{[0-9]\}))?)\s*[({]?\s*([0-9]+(?:\.[0-9]+)?)"
            r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree)\s*[)}]?",
            r"\1(\\frac{\2\\pi}{180})",
        ),
        # Braces and spaces round a sign: `7{:}30`, `7\\mathbin{:}30`, `2{\\,}500`.
        (r"\\math(?:bin|rel|punct|ord|op|open|close|inner)(?![a-zA-Z])|(?<=\})\\!|\\!(?=\s*\{)", ""),
        (
            r"(?:\\(?:text|mathrm)\s*|(?<!\\))\{\s*(?:\\[,;:! ]\s*)?([-+:;/=<>]|\\[,;:! ]|\\colon(?![a-zA-Z]))"
            r"\s*(?:\\[,;:! ]\s*)?\}",
            r"\1",
        ),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"(?<=[0-9])[eE]([+-]?[0-9]{1,5})(?![0-9a-zA-Z_.])", r"\\times 10^{\1}"),
        (
            r"\\p?mod\s*(?:\{\s*([0-9]+)\s*\}|([0-9]+))|\(\s*\\?mod\s*([0-9]+)\s*\)|(?<=\s)mod\s+([0-9]+)",
            r"\\text{ mod \1\2\3\4}",
        ),
        (
            r"(?<=[0-9])\s*(?:\\colon(?![a-zA-Z])|\\text\s*\{\s*(?:is )?to\s*\}|(?<=\s)(?:is )?to(?=\s))\s*(?=[0-9])",
            ":",
        ),
        (
            r"\\(?:mbox|mathrm|mathit|mathsf|textbf|textit|textrm|textnormal|mathbf|boldsymbol|operatorname\*?)\s*(?=\{)",
            r"\\text",
        ),
        (r"\\text\s*\{\s*([ie])\s*\}", r"\1"),
        (r"\\[dt]?binom\s*([0-9]|\s[a-z])\s*([0-9a-z])", r"\\binom{\1}{\2}"),
        (r"\{\s*([0-9a-zA-Z]+)\s*\\choose\s*([0-9a-zA-Z]+)\s*\}", r"\\binom{\1}{\2}"),
        (r"\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}", r"\\text{ \1/\2}"),
        (r"\\(?:overline|underline)\s*(?=\{\s*\))", ""),
        (r"\\text\s*\{\s*\}", ""),
        (
            r"(?<=[0-9])(?<![^0-9]0)(?<!^0)\s*\{\s*,\s*\}\s*(?=[0-9]{3}(?![0-9]))|(?<=[0-9]),\\!\s*(?=[0-9]{3}(?![0-9]))",
            "",
        ),
        (r"(?<=[0-9])\\[,;: !]\s?(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<=[0-9])\s*\{\s*,\s*\}(?=[0-9])", "."),
        (r"(?<!\\)\{\s*,\s*\}", ","),
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
        (rf"{_REALS_WITHOUT}\\\{{\s*([^{{}},]*?)\s*\\\}}", r"(-\\infty,\1)\\cup(\1,\\infty)"),
        (rf"{_REALS_WITHOUT}\[([^\[\](),]*),([^\[\](),]*)\]", r"(-\\infty,\1)\\cup(\2,\\infty)"),
        (rf"{_REALS_WITHOUT}\(([^\[\](),]*),([^\[\](),]*)\)", r"(-\\infty,\1]\\cup[\2,\\infty)"),
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
        (r"\\text\s*\{\s*([A-J](?:\s*,\s*[A-J])+|[0-9]+:[0-9]+)\s*\}", r"\1"),
        (r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
        (r"(?<=[0-9})\]])or(?=[a-zA-Z(\\])", ","),
        (r",(?:\s*,)+", ","),
    )
)
# 0.3\overline{6}, 0.3\dot{6}, 0.3(6), 0.3666..., 0.6 repeating.
_REPEATING = re.compile(
    r"(?<![0-9.,])(?P<whole>[0-9]{0,40})(?:\.|\{,\}|,(?=[\\(]))\{?(?P<fixed>[0-9]{0,40})\s?"
    r"(?:\\(?:overline|bar)\s*(?:\{\s*(?P<over>[0-9]{1,40})\s*\}|(?P<bar>[0-9]))|\((?P<round>[0-9]{1,40})\)"
    r"|\\dot\s*\{?(?P<first>[0-9])\}?(?:(?P<middle>[0-9]{0,40})\\dot\s*\{?(?P<last>[0-9])\}?)?"
    r"|(?P<dots>\.{3}|\\[lc]?dots(?![a-zA-Z]))|(?P<word>\(?(?:\\text\s*\{\s*)?(?:repeating|recurring)\s*[)}]?))"
)
_MARKED = re.compile(r"(?:[0-9][\u0304\u0305])+")
_DOTTED = re.compile(r"([0-9])\u0307")
_POWER = re.compile(r"(?<=[a-zA-Z0-9)}])\*\*(?=[a-zA-Z0-9({\-])")
_DOUBLED_COMMAND = re.compile(r"\\\\(?=[a-zA-Z%$])")
# `x &= 10 + 7 \\\\ &= 17`: one equation on two lines.
_NEXT_STEP = re.compile(r"\\\\\s*(?:\[[^\[\]]{0,9}\]\s*)?&?\s*=")
_HAS_ROWS = re.compile(r"matrix|array|cases|align|split|gather")
_MONEY = re.compile(r"(?<!\\)\$(?=\s?[0-9.])")
_DOLLAR = re.compile(r"(?<!\\)\$+|(?<!\\)\\[()\[\]]")


def _plain(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("\u2212", "-")


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    """The answer with one spelling per sign, without math delimiters, spacing and layout."""
    if not text.isascii():
        text = _MARKED.sub(lambda run: f"\\overline{{{run.group()[::2]}}}", _DOTTED.sub(r"\\dot{\1}", text))
        text = _ROOT.sub(lambda root: f"\\sqrt{'[3]' * (root[1] == '∛')}{{{root[2] or root[3]}}}", text)
        text = PARTS_OF_ONE.sub(lambda part: "\\frac{{{}}}{{{}}}".format(*_plain(part[0]).split("\u2044")), text)
        text = _LOWERED.sub(
            lambda run: f"_{{{_plain(run[0])}}}", _POWERS.sub(lambda run: f"^{{{_plain(run[0])}}}", text)
        )
        text = _LETTERS_OF_MATHEMATICS.sub(lambda run: _plain(run[0]), text).translate(_SYMBOLS)
    text = _POWER.sub("^", text).replace("**", " ").strip().strip("*`").strip()
    if not _HAS_ROWS.search(text):
        text = _DOUBLED_COMMAND.sub(r"\\", text)
    else:
        text = _ENVIRONMENT.sub(" ", text) if _ENVIRONMENT.search(text) and "matrix" not in text else text
        if "matrix" not in text and "array" not in text:
            text = _NEXT_STEP.sub("=", text).replace("\\\\", ",").replace("&", " ")
    if text.count("$") == 1:
        text = _MONEY.sub(r"\\$", text)
    text = _DOLLAR.sub(" ", text)
    if "." in text or "," in text:
        text = _REPEATING.sub(_exactly, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return trimmed(text)


def repeats(text: str) -> bool:
    """Whether a text holds a repeating decimal."""
    return _REPEATING.search(text) is not None


def _exactly(decimal: re.Match[str]) -> str:
    """The fraction that a repeating decimal is; what shows no repetition stays as it is."""
    fixed = decimal["fixed"]
    repeated = decimal["over"] or decimal["bar"] or decimal["round"] or ""
    if decimal["first"]:
        repeated = decimal["first"] + (decimal["middle"] or "") + (decimal["last"] or "")
    elif decimal["word"]:
        fixed, repeated = "", fixed
    elif decimal["dots"]:
        sizes = (
            size
            for size in range(1, len(fixed) // 2 + 1)
            if fixed[-max(size, 2) :] == fixed[-max(size, 2) - size : -size]
        )
        size = next(sizes, 0)
        repeated = fixed[len(fixed) - size :]
        while repeated and fixed.endswith(repeated):
            fixed = fixed[:-size]
    if not repeated:
        return decimal.group()
    start = decimal["whole"] + fixed
    value = Fraction(int(start + repeated) - int(start or 0), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def trimmed(text: str) -> str:
    """The text without the punctuation around it. A `!` behind a number or name is a factorial."""
    text = text.strip()
    while text and (text[-1] in ".,;:。" or text.endswith("\\") or (text[-1] == "!" and not text[-2:-1].isalnum())):
        if text.endswith("\\!") or (text.endswith("!") and text[-2:-1] in ")}]"):
            break
        text = text[:-1].rstrip()
    return text.lstrip(",;:").strip('" ')
