"""Ground truths of public evaluation sets, where the data directory beside the repository holds them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_mega.rewards import AnswerVerifier, extract_ground_truth
from dapo_mega.rewards.grading import Grader

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

DATA = Path(__file__).parents[4] / "shared" / "data"

# File, number of rows, column of the ground truth, style in which the column is written.
DATASETS: list[tuple[str, int, Callable[[dict[str, Any]], str], str]] = [
    ("math500.json", 500, lambda row: row["final_answer"], "none"),
    ("aime2024.json", 30, lambda row: row["final_answer"], "none"),
    ("amc23.jsonl", 40, lambda row: str(row["answer"]), "none"),
    ("minerva-math.jsonl", 272, lambda row: row["solution"], "boxed"),
    ("gsm8k-test.jsonl", 1319, lambda row: row["answer"], "gsm8k"),
    ("olympiadbench.jsonl", 675, lambda row: row["final_answer"][0], "none"),
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[AnswerVerifier]:
    with AnswerVerifier(2, 5.0) as verifier:
        yield verifier


def ground_truths(name: str, column: Callable[[dict[str, Any]], str], style: str) -> list[str]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {name} in shared/data beside the repository")
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return [extract_ground_truth(column(row), style) for row in rows]


@pytest.mark.parametrize(("name", "size", "column", "style"), DATASETS, ids=[row[0] for row in DATASETS])
def test_every_ground_truth_equals_itself(
    verifier: AnswerVerifier, name: str, size: int, column: Callable[[dict[str, Any]], str], style: str
) -> None:
    truths = ground_truths(name, column, style)
    assert len(truths) == size
    verdicts = verifier.verify([(f"Thus.\n\nAnswer: ${truth}$", truth) for truth in truths])
    wrong = [(truth, verdict) for truth, verdict in zip(truths, verdicts, strict=True) if not verdict.correct]
    assert wrong == []


@pytest.mark.parametrize(("name", "size", "column", "style"), DATASETS, ids=[row[0] for row in DATASETS])
def test_no_ground_truth_equals_the_next_one(
    verifier: AnswerVerifier, name: str, size: int, column: Callable[[dict[str, Any]], str], style: str
) -> None:
    truths = ground_truths(name, column, style)
    following = [*truths[1:], truths[0]]
    grades = [(pair, Grader().grade(*pair)) for pair in zip(following, truths, strict=True)]
    assert sum(grade is not True for _, grade in grades) > 0.9 * size
    # Algebra is slow to deny; a sample of what needs it is enough.
    decided = [pair for pair, grade in grades if grade is False]
    undecided = [pair for pair, grade in grades if grade is None][:20]
    items = [(f"Answer: ${candidate}$", truth) for candidate, truth in decided + undecided]
    verdicts = verifier.verify(items)
    accepted = [item for item, verdict in zip(items, verdicts, strict=True) if verdict.correct]
    assert accepted == []


def test_variants_of_math500_answers_are_accepted(verifier: AnswerVerifier) -> None:
    truths = ground_truths("math500.json", lambda row: row["final_answer"], "none")
    fractions = [truth for truth in truths if truth.startswith("\\frac{")]
    assert len(fractions) > 50
    doubled = verifier.verify([(f"Answer: $\\frac{{2}}{{2}}\\cdot{truth}$", truth) for truth in fractions])
    assert sum(verdict.correct for verdict in doubled) >= 0.97 * len(fractions)
