"""GeneralPoints in its language form, as an environment (arXiv 2501.17161, section 4.1, appendix A.3).

The policy is shown cards and answers with a formula; a wrong answer is followed by the verifier's message and another
try. Each answer earns the paper's reward: 5 right; -1 a formula that uses each card once and misses the target; -2
numbers that were not given; -3 all else that is no such formula. Who has used up all answers gets -1 more.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, Literal

import numpy as np

from dapo_mega.data.general_points import FaceCards, PointsTask, Style, prompt_text, values_of

Kind = Literal["right", "wrong_value", "wrong_numbers", "illegal"]

REWARDS: Final[Mapping[Kind, float]] = {"right": 5.0, "wrong_value": -1.0, "wrong_numbers": -2.0, "illegal": -3.0}
OUT_OF_ANSWERS: Final = -1.0
_SHORT: Final[Mapping[Kind, str]] = {"right": "", "wrong_value": "~", "wrong_numbers": "#", "illegal": "?"}
_ALLOWED: Final = re.compile(r"[0-9+\-*/() ]{1,200}")
_PLAIN: Final = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-"})
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip
_FORMULA: Final = re.compile(r"""formula["']?\s*[:=]\s*["']?([^"'\n}]*)""")


class GeneralPoints:
    """One deal. A row's `cards` (ranks 1 to 13), `face_cards` and `target` say which; a row without cards is dealt by
    the seed, and shown in the first observation. The run's `max_turns` should be `max_answers`."""

    def __init__(
        self,
        face_cards: FaceCards = "ten",
        target: int = 24,
        max_answers: int = 5,
        num_cards: int = 4,
        prompt_style: Style = "paper",
    ) -> None:
        self._face_cards: FaceCards = face_cards
        self._task = PointsTask(num_cards, target)
        self._target = target
        self._max_answers = max_answers
        self._style: Style = prompt_style

    def reset(self, task: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
        fields = task["fields"]
        self._face_cards = fields.get("face_cards", self._face_cards)
        self._target = int(fields.get("target", self._target))
        deal = tuple(map(int, fields.get("cards", ()))) or self._task.deal(
            np.random.Generator(np.random.PCG64(seed)), self._face_cards
        )
        self._values = values_of(deal, self._face_cards)
        if "cards" in fields:
            return None
        return {"text": prompt_text(deal, self._face_cards, self._target, self._style)}

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        kind, why = verify(read_formula(action["text"], self._style), self._values, self._target)
        is_last = action["turn"] + 1 >= self._max_answers
        reward = REWARDS[kind] + OUT_OF_ANSWERS * (is_last and kind != "right")
        message = message_text(kind, why, self._style)
        return {
            "text": "" if kind == "right" or is_last else message,
            "done": kind == "right" or is_last,
            "reward": reward,
            "correct": kind == "right",
            "parts": {**{name: float(name == kind) for name in REWARDS}, "answers": 1.0},
        }


def read_formula(text: str, style: Style) -> str:
    """What stands before `=` in the formula of the answer: of its JSON object; else of what looks like one; in the
    short style of the whole answer. Empty if there is none."""
    found = text
    if style == "paper":
        try:
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])["formula"]
        except (ValueError, KeyError, TypeError, RecursionError):
            written = _FORMULA.search(text)
            found = written[1] if written else ""
    return found.translate(_PLAIN).partition("=")[0].strip() if isinstance(found, str) else ""


def verify(formula: str, values: tuple[int, ...], target: int) -> tuple[Kind, str]:
    """Of which kind the formula is, and why it is not right, for the policy."""
    used: list[int] = []
    try:
        if not _ALLOWED.fullmatch(formula):
            raise ValueError(formula)
        value = _value(ast.parse(formula, mode="eval").body, used)
    except ZeroDivisionError:
        return "illegal", "your formula divides by zero"
    except (SyntaxError, ValueError, MemoryError):
        return "illegal", "your answer holds no formula of numbers, +, -, *, /, ( and )"
    if unknown := sorted(set(used) - set(values)):
        return "wrong_numbers", f"you used numbers that are not on the cards: {unknown}"
    if excess := sorted((Counter(used) - Counter(values)).elements()):
        return "illegal", f"you used these numbers too many times: {excess}"
    if unused := sorted((Counter(values) - Counter(used)).elements()):
        return "illegal", f"you did not use these numbers: {unused}"
    return ("right", "") if value == target else ("wrong_value", f"your formula does not equal {target}")


def message_text(kind: Kind, why: str, style: Style) -> str:
    """The verifier's message after a wrong answer; in the short style a character for its kind."""
    return f"You failed this trial because {why}. Try again." if style == "paper" else _SHORT[kind]


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The exact value of a formula; its numbers are added to `used`. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as kind, right=right):
            return _OPERATORS[type(kind)](_value(left, used), _value(right, used))
    raise ValueError("no formula")
