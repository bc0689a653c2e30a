"""The boxes and formulas of a text, and which of the last ones one sentence lists."""

import re
from dataclasses import dataclass
from typing import Final

from dapo_mega.rewards import denials, prose
from dapo_mega.rewards.normalization import closing_brace

BOX = re.compile(r"\\[fb]?box(?:ed)?(?![a-zA-Z])[ \t]*(?:\[[^\[\]\n]{0,80}\])?")
_BARE_BOX = re.compile(r"[^\s${},.;\\]{1,40}")
_MATH_TOKEN = re.compile(r"\\\\|\\\$|\$\$|\$|\\[\[\]()]|\n")
_CLOSING: Final = {"$$": "$$", "$": "$", "\\[": "\\]", "\\(": "\\)"}

# The words between two boxes of one sentence: short, and no second thought.
_LONGEST_LINK: Final = 70
_LINK_WORD = re.compile(r"(?<![a-zA-Z])(?:and|or|und|et)(?![a-zA-Z])|[,;&]")
_SECOND_THOUGHT = re.compile(
    r"(?i)(?<![a-z])(?:wait|actually|hmm|but|not|no|instead|rather|correct(?:ion|ed)?|so|hence|thus|therefore|then|sorry"
    r"|which|where|since|because|i\.?e|simplif\w*|approx\w*|check|let|if|means|gives?|yields?)(?![a-z])|=>|\\implies|≈"
    r"|\\approx|\\Rightarrow|\\to(?![a-z])|→"
)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n[ \t]*\n")
_LAYOUT = re.compile(r"\\(?:q?quad|[,;:! ]|text\w*|mbox|mathrm|\[|\]|\(|\))|[\s${}~]")
_END_OF_PROOF = re.compile(r"\s*\\(?:blacksquare|square|Box|qed\w*|checkmark|therefore)\s*")
_DIGIT = re.compile(r"[0-9]")
_BASE = re.compile(r"_(?:[0-9]+|\{[^{}\n]{1,20}\})")
PERCENT = re.compile(r"[ \t]*(?:\\?%|(?:percent(?:age)?|pct)(?![a-zA-Z]))", re.IGNORECASE)
_FORMULA_LINK = re.compile(
    r"(?:\s|[,;&]|(?<![a-zA-Z])(?:and|or|und|et)(?![a-zA-Z])"
    r"|(?<![a-zA-Z])(?!(?:and|or|und|et)(?![a-zA-Z]))[a-zA-Z]{1,12}(?=\s(?:and|or)\s))*"
)
_SAID_AFTER = re.compile(
    rf"(?<![a-zA-Z])(?:is|are|equals|=)[ \t]+(?:[a-z]+[ \t]+){{0,2}}(?P<value>{prose.NUMBER.pattern})"
)
_NUMBER_AT_END = re.compile(r"[0-9.]{0,19}[0-9]$")


@dataclass(frozen=True)
class Span:
    """Part of a text: where it starts, where the text goes on after it, and what it holds."""

    start: int
    end: int
    content: str


def listed(contents: list[str]) -> str:
    """Several values in one answer, each once."""
    return ", ".join(dict.fromkeys(content.strip() for content in contents if content.strip()))


def find_boxes(text: str) -> list[Span] | None:
    r"""All outermost `\boxed{...}`; None where the last one never closes."""
    boxes: list[Span] = []
    position = 0
    while match := BOX.search(text, position):
        if match.end() < len(text) and text[match.end()] == "{":
            close = closing_brace(text, match.end())
            if close < 0:
                return None
            end, content = close + 1, text[match.end() + 1 : close]
        elif bare := _BARE_BOX.match(text, match.end()):
            end, content = bare.end(), bare.group()
        else:
            end, content = match.end(), ""
        if not denials.is_denied(text, match.start(), end):
            boxes.append(Span(match.start(), end, content))
        position = max(end, match.end())
    return boxes


def listed_boxes(text: str, boxes: list[Span]) -> list[str]:
    """What the boxes hold that one sentence at the end lists, with the percent sign or base behind them."""
    first = len(boxes) - 1
    while first > 0 and _linked(text[boxes[first - 1].end : boxes[first].start]):
        first -= 1
    contents = []
    for box in boxes[first:]:
        percent = PERCENT.match(text, box.end) or PERCENT.match(text[box.end : box.end + 20].lstrip("$ )\\"))
        base = _BASE.match(text, box.end)
        after = "\\%" if percent and "%" not in box.content else base.group() if base else ""
        contents.append(box.content + after)
    return contents


def _linked(between: str) -> bool:
    if len(between) > _LONGEST_LINK or _SENTENCE_END.search(between) or _SECOND_THOUGHT.search(between):
        return False
    words = _LAYOUT.sub("", between)
    return len(words) <= 8 or _LINK_WORD.search(between) is not None


def find_formulas(text: str) -> list[Span]:
    """Everything between math delimiters, in order, in one pass. Inline formulas end with their line."""
    spans: list[Span] = []
    if "$" not in text and "\\" not in text:
        return spans
    opening: re.Match[str] | None = None
    for token in _MATH_TOKEN.finditer(text):
        mark = token.group()
        if mark in ("\\\\", "\\$"):
            continue
        if opening is None:
            if mark in _CLOSING:
                opening = token
        elif mark == "\n":
            if opening.group() in ("$", "\\("):
                opening = None
        elif mark == _CLOSING[opening.group()]:
            content = text[opening.end() : token.start()]
            if mark == "$" and _DIGIT.match(text, token.end()):
                # The sign of money: `$5 and $7`.
                opening = token
            elif content.strip() and not _END_OF_PROOF.fullmatch(content):
                spans.append(Span(opening.start(), token.end(), content))
                opening = None
            else:
                opening = None
    return spans


def joined_formulas(text: str, formulas: list[Span]) -> str:
    """The last formula, with those before it that are listed with it, and with a percent sign behind it.

    `The value of $x$ is 5` names its value after the last formula.
    """
    if said := _SAID_AFTER.search(text, formulas[-1].end):
        return said["value"].strip()
    first = len(formulas) - 1
    while first > 0:
        between = text[formulas[first - 1].end : formulas[first].start]
        if len(between) > _LONGEST_LINK or not _FORMULA_LINK.fullmatch(between):
            break
        first -= 1
    group = formulas[first:]
    values = []
    for formula in group:
        value = formula.content.strip()
        if boxes := find_boxes(value):
            value = listed([box.content for box in boxes])
        if "%" not in value and PERCENT.match(text, formula.end):
            value += "\\%"
        values.append(value.rstrip(".,; "))
    # `2$\sqrt{3}$`: the number outside belongs to the value.
    if number := _NUMBER_AT_END.search(text[: group[0].start]):
        values[0] = number.group() + values[0]
    return listed(values)
