"""Find the final answer in a response, and the reference answer in a dataset column.

Every style runs in time linear in the text, whatever a model wrote.
"""

import re
from collections.abc import Callable
from typing import Final, Literal, get_args

from dapo_mega.rewards.equivalence import validate_ground_truth
from dapo_mega.rewards.free_text import find_answer, tagged
from dapo_mega.rewards.normalization import closing_brace
from dapo_mega.rewards.thoughts import spoken

ExtractionStyle = Literal["dapo", "boxed", "r1", "gsm8k", "auto", "last_number", "none"]

# The rule of the DAPO recipe: only the end of a response can hold its answer.
TAIL_CHARACTERS: Final = 300

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}` with balanced braces; None if none or if it never closes."""
    start, command = max((text.rfind(command), command) for command in ("\\boxed", "\\fbox"))
    if start < 0:
        return None
    opening = start + len(command)
    while opening < len(text) and text[opening] == " ":
        opening += 1
    close = closing_brace(text, opening) if text.startswith("{", opening) else -1
    return text[opening + 1 : close] if close >= 0 else None


def _after_hashes(text: str) -> str | None:
    """Rest of the line after the last `####`, as in GSM8K's `answer` column."""
    _, marker, rest = text.rpartition("####")
    return rest.partition("\n")[0] if marker else None


def _last_in_tail(pattern: re.Pattern[str], text: str) -> str | None:
    return next(reversed(pattern.findall(text[-TAIL_CHARACTERS:])), None)


_EXTRACTORS: Final[dict[str, Callable[[str], str | None]]] = {
    "dapo": lambda text: _last_in_tail(_ANSWER_LINE, text),
    "boxed": lambda text: last_boxed(spoken(text)),
    "r1": lambda text: tagged(spoken(text), must_close=True),
    "gsm8k": lambda text: _after_hashes(spoken(text)),
    "auto": find_answer,
    "last_number": lambda text: (_last_in_tail(_NUMBER, spoken(text)) or "").rstrip(","),
    "none": lambda text: text,
}


def check_extraction_style(style: str) -> None:
    """Raises ValueError for a style that is not an `ExtractionStyle`."""
    if style not in _EXTRACTORS:
        raise ValueError(f"extraction style {style!r}; choose one of {', '.join(get_args(ExtractionStyle))}")


def extract_answer(response: str, style: str = "dapo") -> str | None:
    r"""The final answer as the response wrote it, stripped but not normalised; None where there is none.

    `dapo`: the last match of `(?i)Answer\s*:\s*([^\n]+)` within the last 300 characters (DAPO's rule).
    `boxed`: the last balanced `\boxed{...}`. `r1`: the last `<answer>...</answer>`. `gsm8k`: what follows the last
    `####` on its line. `auto`: whatever a response without a format states last, see `free_text`.
    `last_number`: the last number within the last 300 characters. `none`: the whole text.
    Special tokens such as an end-of-turn marker must have been removed by the caller.

    Raises ValueError for an unknown style.
    """
    check_extraction_style(style)
    return (_EXTRACTORS[style](response) or "").strip() or None


def extract_ground_truth(text: str, style: str = "none") -> str:
    """The reference answer in a dataset column, checked to be one that responses can be compared with.

    Raises ValueError where the style finds no answer, or `validate_ground_truth` refuses it.
    """
    answer = extract_answer(text, style)
    if answer is None:
        raise ValueError(
            f"no answer of style {style!r} in the ground truth {text[-TAIL_CHARACTERS:]!r}; "
            "correct the row or choose the style that the column is written in"
        )
    return validate_ground_truth(answer)
