"""Scores answers to problems of the library reasoning-gym, an extra of this package, by the generator that made them.

A row's column `reasoning_gym` is the text of a Python literal, as scorers tell tuples from lists: {generator, options,
answer, metadata}.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from dapo_mega.errors import InputError
from dapo_mega.rewards.extraction import extract_answer

try:
    import reasoning_gym
except ImportError as error:
    raise InputError(f"reasoning-gym is absent; pip install 'dapo_mega[reasoning-gym]' ({error})") from error

COLUMN: Final = "reasoning_gym"
RUNS_ANSWERS: Final = frozenset((
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
))  # fmt: skip
"""Generators of 0.1.25 whose scorers evaluate an answer as Python, with this process' rights."""


def score(records: Sequence[Mapping[str, Any]], allow_code: bool = False) -> list[dict[str, Any]]:
    """What the generator's scorer says of the last <answer></answer>, from 0 to 1; only 1 is correct, and no answer is
    0. `allow_code`: also where the scorer runs the answer as a program. Raises InputError without it."""
    return [_score(record, allow_code) for record in records]


def _score(record: Mapping[str, Any], allow_code: bool) -> dict[str, Any]:
    if COLUMN not in record["fields"]:
        raise InputError(f"no column {COLUMN!r}; `dapo-mega prepare reasoning-gym` writes data that has it")
    entry = ast.literal_eval(record["fields"][COLUMN])
    check_code(entry["generator"], allow_code)
    scorer = _scorer(entry["generator"], repr(entry["options"]))
    answer = extract_answer(record["opened_thought"] + record["response"], "r1")
    value, unreadable = 0.0, False
    if answer is not None:
        try:
            value = scorer.score_answer(answer, entry)
        except Exception:  # Some scorers raise at what they cannot read.
            # One that takes the right answer is in order, so the response was wrong; else this raises, too.
            scorer.score_answer(entry["answer"], entry)
            unreadable = True
    return {"score": value, "correct": value >= 1, "answer": answer, "parts": {"unreadable": unreadable}}


def check_code(generator: str, allow_code: bool) -> None:
    """Raises InputError for a scorer that runs what the model wrote, unless that is allowed."""
    if generator in RUNS_ANSWERS and not allow_code:
        raise InputError(
            f"reasoning-gym's scorer of {generator} runs an answer as Python, without a sandbox; leave it out, or "
            f"allow it: --allow-code when the data is prepared, settings: {{allow_code: true}} of the reward"
        )


@lru_cache(maxsize=1024)
def _scorer(generator: str, options: str) -> Any:
    return reasoning_gym.create_dataset(generator, **ast.literal_eval(options), seed=0, size=1)
