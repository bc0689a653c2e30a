r"""Brings problems to one spelling, so that texts that differ in white space, Unicode or LaTeX spelling compare equal.

Views of a text, from strict to coarse: `spelling` (for exact duplicates), `shingles` of it (for near duplicates), and
`words` (for n-grams).
"""

import html
import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property, lru_cache

from confusable_homoglyphs import confusables

SHINGLE_CHARACTERS = 5
"""Length of a shingle."""

DRAWING = re.compile(r"(?:\[asy\]|<asy>).*?(?:\[/asy\]|</asy>)", re.DOTALL)
"""The code of a drawing, which one copy of a problem has and another one lacks."""

_CHARACTERS = str.maketrans(
    {
        "²": "^2", "³": "^3", "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/",
        "‘": "'", "’": "'", "“": '"', "”": '"', "…": "...", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
        "π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "°": "\\circ ", "∠": "\\angle ", "△": "\\triangle ",
        "\u00ad": "", "\u034f": "", "\u200b": "", "\u200c": "", "\u200d": "", "\u200e": "", "\u200f": "",
        "\u2060": "", "\ufeff": "",
    }
)  # fmt: skip
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z]\w{1,30});")
_TAG = re.compile(
    r"</?(?:a|b|br|code|div|em|font|h[1-6]|hr|i|li|ol|p|pre|span|strong|sub|sup|td|tr|u|ul)(?:\s[^<>]{0,200})?/?>"
)
# Commands that change how a formula looks and not what it says.
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|q?quad)(?![a-zA-Z])|\\[,;:!>\s]"
    r"|\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)(?=\s*\{)"
    r"|\\[()\[\]]|\\?\$|~"
)
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "dotsb": "ldots", "lvert": "vert",
    "rvert": "vert", "to": "rightarrow", "degree": "circ", "varnothing": "emptyset",
}  # fmt: skip
_NAME = re.compile(r"(?<=[\\{])[^\W\d_]+")  # of a command or an environment
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_STRUCTURE = frozenset({"frac", "cdot", "times", "begin", "end", "ldots", "circ"})
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)")
_SMALL_BRACES = re.compile(r"\{\s*(\d+|[^\W\d_]+|,|\\[a-zA-Z]+)\s*\}")
# Ideographs and kana stand alone, as no spaces part their words.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(rf"\\[a-zA-Z]+|\d{{1,3}}(?:,\d{{3}})+(?![\d,])|\d+(?:\.\d+)?|[{_ALONE}]|[^\W\d_{_ALONE}]+|\S")


@dataclass(frozen=True)
class NormalText:
    """A text as tokens in one spelling. Case, operators and punctuation stay."""

    tokens: tuple[str, ...]

    @cached_property
    def spelling(self) -> str:
        return " ".join(self.tokens)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Words and numbers in lower case, without operators, punctuation, and commands that shape formulas. Letters
        of other scripts that look like Latin ones are these."""
        return tuple(word for token in self.tokens if (word := _word(token)))

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The numbers, sorted."""
        return tuple(sorted(word for word in self.words if word[0].isdecimal()))

    def shingles(self) -> set[bytes]:
        """All runs of `SHINGLE_CHARACTERS` characters of the spelling in lower case; the whole of a shorter one."""
        text = self.spelling.lower()
        starts = range(max(1, len(text) - SHINGLE_CHARACTERS + 1))
        if text.isascii():
            ascii_text = text.encode()
            return {ascii_text[start : start + SHINGLE_CHARACTERS] for start in starts}
        return {text[start : start + SHINGLE_CHARACTERS].encode("utf-8", "surrogatepass") for start in starts}


@lru_cache(maxsize=8)  # One text goes through several steps.
def normal_text(text: str) -> NormalText:
    """The text in one spelling; linear in its length."""
    return NormalText(tuple(_tokens(text)))


def _word(token: str) -> str:
    if token[0] == "\\":
        return token[1:] if token[1:2].isalpha() and token[1:] not in _STRUCTURE else ""
    if not token[0].isalnum():
        return ""
    return (token if token.isascii() else "".join(map(_latin, token))).lower().replace(",", "")


@lru_cache(maxsize=2**16)
def _latin(letter: str) -> str:
    """The Latin letter that looks like `letter` or like its capital (Unicode's confusables); else the letter itself."""
    for form in (letter, letter.upper()):
        alike = [entry["c"] for entry in confusables.confusables_data.get(form, ())]
        latin = [one for one in alike if len(one) == 1 and one.isascii() and one.isalpha()]
        if latin and not letter.isascii():
            return min(latin, key=lambda one: one.isupper() != form.isupper())
    return letter


def _tokens(text: str) -> list[str]:
    if "&" in text and ";" in text:
        for _ in range(2):  # Some sources escape twice.
            text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if "<" in text:
        text = _TAG.sub(" ", text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
        text = _NAME.sub(lambda name: "".join(map(_latin, name[0])), text)
    if "\\" in text:
        text = _COMMAND.sub(lambda command: "\\" + _SYNONYMS.get(command[1], command[1]), text)
        text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _LAYOUT.sub(" ", text)
    if "{" in text:
        text = _SMALL_BRACES.sub(lambda braces: "," if braces[1] == "," else f" {braces[1]} ", text)
    return _TOKEN.findall(text)
