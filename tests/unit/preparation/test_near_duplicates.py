"""Near duplicates and contamination, on edits with known answers: what is found, and what is left alone."""

import json
import random
from pathlib import Path

import pytest

from dapo_mega.config.preparation import EvaluationSetConfig
from dapo_mega.data.templates import render
from dapo_mega.preparation.contamination import EvaluationIndex, EvaluationProblem
from dapo_mega.preparation.near_duplicates import NearDuplicates
from dapo_mega.preparation.normalization import normal_text
from dapo_mega.preparation.sources import evaluation_problems

from .edits import DISGUISED, OTHER, SAME, Edit

STORY = "a farmer has many red apples and buys more green pears on the market while his friends sell all of theirs "
DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.fixture(scope="module")
def problems() -> list[str]:
    if not DATA.is_dir():
        pytest.skip("needs the benchmarks of shared/data")
    lines = (DATA / "gsm8k-train.jsonl").read_text().splitlines()
    rows = [json.loads(line)["question"] for line in lines[:100]]
    return rows + [row["prompt"][0]["value"] for row in json.loads((DATA / "math500.json").read_text())[:100]]


def edited(problems: list[str], edit: Edit) -> list[tuple[str, str]]:
    draw = random.Random(0)
    return [(text, other) for text in problems if (other := edit(text, draw)) and other != text]


def share_found(folder: Path, pairs: list[tuple[str, str]], other_answer: str = "1") -> float:
    near = NearDuplicates(folder / "keys", 0.8)
    texts = [text for pair in pairs for text in pair]
    for first, second in pairs:
        near.add(normal_text(first), "1")
        near.add(normal_text(second), other_answer)
    found = near.found(lambda row: normal_text(texts[row]))
    assert all(later == earlier + 1 and earlier % 2 == 0 for later, (earlier, _) in found.items()), "the edited pair"
    return len(found) / len(pairs)


def test_edited_problems_are_found_and_other_problems_stay(problems: list[str], tmp_path: Path) -> None:
    # tools/preparing.md has the table of all edits, measured on 2,700 problems.
    found = {name: share_found(tmp_path, edited(problems, edit)) for name, edit in SAME.items()}
    wanted = {"spelling": 1.0, "typo": 0.95, "one word": 0.82, "a heading more": 0.85, "sentences swapped": 0.98}
    assert {name: found[name] for name, share in wanted.items() if found[name] < share} == {}
    assert share_found(tmp_path, edited(problems, OTHER["one number"])) == 0
    assert share_found(tmp_path, edited(problems, OTHER["another question"])) < 0.04
    assert share_found(tmp_path, edited(problems, SAME["spelling"]), other_answer="2") == 0


def test_comparisons_grow_with_the_rows_and_not_with_their_square(tmp_path: Path) -> None:
    near = NearDuplicates(tmp_path / "keys", 0.99)
    # All share numbers, answer and most of their text, and no two are similar enough.
    draw = random.Random(0)
    texts = [STORY + "".join(draw.choices("abcdefghij ", k=20)) for _ in range(300)]
    for text in texts:
        near.add(normal_text(text), "1")
    assert near.found(lambda row: normal_text(texts[row])) == {}
    assert len(texts) < near.num_compared < len(texts) ** 2 / 4


def test_evaluation_problems_are_found_in_edited_prompts(problems: list[str]) -> None:
    index = EvaluationIndex([EvaluationProblem(f"set, row {i}", text) for i, text in enumerate(problems)], 8, 5, 0.6)
    found = {}
    for name, edit in {**SAME, **OTHER, **DISGUISED}.items():
        pairs = edited(problems, edit)
        hits = [index.find(normal_text(other)) for _, other in pairs]
        right = [hit is not None and hit.problem.text == text for hit, (text, _) in zip(hits, pairs, strict=True)]
        found[name] = sum(right) / len(right)
    wanted = {"spelling": 1.0, "typo": 0.88, "one word": 0.88, "two words": 0.8, "a sentence more": 0.98}
    wanted |= {"a heading more": 0.98, "sentences swapped": 0.95, "one number": 0.85}
    wanted |= {"escaped": 1.0, "look-alike": 0.97, "interspersed": 0.9}
    assert {name: found[name] for name, share in wanted.items() if found[name] < share} == {}


def test_instructions_and_drawings_of_evaluation_problems_hide_nothing(tmp_path: Path) -> None:
    problem = "Rectangles ABCD and EFGH are drawn so that D, E, C, F are on a line. If BC = 16, what is CE's length?"
    short = "In the diagram, what is the area of the shaded triangle?"
    drawing = "<asy> pair A = (0,0); pair B = (70,0); dot(A); draw(A--B); label(A, S); label(B, N); </asy>"
    rows = [render("dapo", problem), f"{problem} {drawing}", f"{short} {drawing}"]
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    problems, _ = evaluation_problems("set", EvaluationSetConfig(path=str(file)))
    for found in problems[:2]:
        index = EvaluationIndex([found], 8, 5, 0.6)
        hit = index.find(normal_text(problem))
        assert hit is not None
        assert hit.share == 1.0
    index = EvaluationIndex(problems[2:], 8, 5, 0.6)
    assert index.find(normal_text(f"{short} {drawing}")) is not None
    assert index.find(normal_text(f"{short} [asy] draw((1,2)--(3,4)--cycle); fill(unitcircle); [/asy]")) is None


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the benchmarks of shared/data")
def test_training_problems_that_only_sound_alike_are_not_contaminated() -> None:
    tests = [json.loads(line)["question"] for line in (DATA / "gsm8k-test.jsonl").read_text().splitlines()]
    index = EvaluationIndex([EvaluationProblem(f"test, row {i}", text) for i, text in enumerate(tests)], 8, 5, 0.6)
    lines = (DATA / "gsm8k-train.jsonl").read_text().splitlines()[:500]
    found = {text: index.find(normal_text(text)) for line in lines for text in [json.loads(line)["question"]]}
    assert [text[:40] for text, hit in found.items() if hit] == ["Bella bought stamps at the post office. "]


def test_evidence_names_the_problem_and_quotes_the_longest_run() -> None:
    problem = "Ann has 3 red apples and buys 12 green pears today. How many fruits are there?"
    short = "Compute $1+2+3$."
    index = EvaluationIndex(
        [EvaluationProblem("set/a.json, row 7", problem), EvaluationProblem("short", short)], 8, 5, 0.5
    )
    hit = index.find(normal_text("Bob says: Ann has $3$ red apples, and buys 12 green pears. How many?"))
    assert hit is not None
    assert hit.evidence() == (
        "62% of set/a.json, row 7 stands here in runs of words; the longest has 10 words: "
        "ann has 3 red apples and buys 12 green pears"
    )
    # A problem of fewer words than the limit must be the whole prompt.
    assert index.find(normal_text("compute 1 + 2 + 3")) is not None
    assert index.find(normal_text("Compute 1+2+3 apples")) is None
    assert len(index) == 2
