"""Reads the ground truth of a row: the column's value as text, and the answer in this text."""

import contextlib
import json
import math
import re
from decimal import Decimal
from typing import Any

from dapo_mega.config import SourceConfig
from dapo_mega.data.numbers import NOT_FINITE, NumberText, RoundedFloat, number_text, plain
from dapo_mega.data.readers import Row
from dapo_mega.errors import InputError

_EXTRACTION = {"verbatim": "none", "boxed": "boxed", "gsm8k": "gsm8k"}
"""`SourceConfig.ground_truth_style` in the names of `dapo_mega.rewards`."""

_JSON_TEXTS = re.compile(r'\s*[\[{]\s*"')


def ground_truth_text(row: Row, config: SourceConfig) -> str:
    """The column's value as text: numbers as written, a list joined by commas, or as JSON where any of it is right or
    it is unchecked. A list of texts may itself be written as JSON. Raises `InputError` for a value of another type."""
    value = row.value(config.columns.ground_truth, "columns.ground_truth")
    if config.ground_truth_style == "unchecked":
        return row.text(value) if isinstance(value, str) else row.text(json.dumps(plain(value), default=str))
    answers = _listed(value)
    if value is None or not answers or not all(map(_is_answer, answers)):
        given = "null" if value is None else f"{value!r:.80}"
        raise InputError(
            f"{row.where}: the ground truth must be text, a finite number or a list of them, got {given}; "
            f"correct the row, or set columns.ground_truth to another column"
        )
    if rounded := [answer for answer in answers if isinstance(answer, RoundedFloat)]:
        raise InputError(
            f"{row.where}: the ground truth {number_text(rounded[0])} stands in a column of floats, which does not "
            f"tell so large a number from its neighbours; write it as text or integer"
        )
    texts = [row.text(number_text(a) if isinstance(a, float | Decimal) else str(a).strip("\ufeff")) for a in answers]
    return json.dumps(texts) if config.several_answers == "any" and len(texts) > 1 else ", ".join(texts)


def _listed(value: Any) -> list[Any]:
    """The answers of a value: its items if it is a list, also one of texts that is written as JSON."""
    if isinstance(value, str) and _JSON_TEXTS.match(value):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(value)
            return found if isinstance(found, list) else [found]
    return value if isinstance(value, list) else [value]


def _is_answer(value: Any) -> bool:
    if isinstance(value, NumberText):
        return value not in NOT_FINITE
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, str | int | Decimal)


def extracted_answer(row: Row, text: str, config: SourceConfig) -> str:
    """The answer in the ground truth's `text`. Raises `InputError` naming the row if none can be compared."""
    try:
        return parsed_answer(text, config)
    except ValueError as error:
        raise InputError(f"{row.where}: {error}") from error


def parsed_answer(text: str, config: SourceConfig) -> str:
    """The answer in the ground truth's `text`. Raises ValueError if there is none that can be compared."""
    if config.ground_truth_style == "unchecked":
        return text
    # Imported here: package rewards is needed for this one call only.
    from dapo_mega.rewards import extract_ground_truth, gold_answers

    style = config.ground_truth_style
    golds = gold_answers(text) if config.several_answers == "any" else (text,)
    answers = [extract_ground_truth(gold, _EXTRACTION[style]) for gold in golds]
    if style == "gsm8k":
        # GSM8K writes thousands with commas; no answer in it is a list.
        answers = [answer.replace(",", "") for answer in answers]
    return answers[0] if len(answers) == 1 else json.dumps(answers)
