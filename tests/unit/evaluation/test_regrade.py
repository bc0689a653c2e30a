"""Saved responses scored again: what changes, what stays, and that nothing is written over."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from dapo_mega.commands.regrade import main
from dapo_mega.errors import InputError
from dapo_mega.evaluation.saved import load_evaluations
from dapo_mega.samples.files import file_of, samples_folder, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import Row, SampleFile
from dapo_mega.samples.table import to_table
from dapo_mega.types import Prompt, Response
from tests.made_trajectories import scored_answer

from .made_evaluations import SETTINGS

SAID = ("Answer: 7", "so \\boxed{7}", "Answer: 8", "\\boxed{7} and Answer: 8")
REWARD = """
def score(records):
    return [{"score": float(len(r["response"])), "correct": r["response"].startswith("so")} for r in records]
"""


class Letters:
    def batch_decode(self, sequences, skip_special_tokens=False):
        return ["".join(chr(97 + token % 26) for token in sequence) for sequence in sequences]


def save(folder, kind="evaluation", step=0, settings=SETTINGS):
    """Four responses as the style dapo judges them: only the first is right."""
    prompt = Prompt(3, "What is 3 + 4?", np.arange(3, dtype=np.int32), "7", data_source="sums")
    rows = []
    for number, text in enumerate(SAID):
        response = Response(number, np.full(4, number, np.int32), np.full(4, -0.5, np.float32), "stop", 0)
        answer = text.partition("Answer: ")[2] or None
        rows.append(Row(0, prompt, scored_answer(response, text, number == 0, 1.0, 1.0, answer)))
    path = file_of(samples_folder(folder), kind, step)
    write_table(
        path,
        to_table(SampleFile(step, kind, rows, {"settings": settings, "engines": ["embedded"]}), TokenPieces(Letters())),
    )
    return path


def rows_of(path):
    return pq.read_table(path).to_pylist()


def test_another_extraction_changes_verdicts_and_nothing_else(tmp_path, capsys):
    folder = tmp_path / "made"
    old = save(folder)
    before = old.read_bytes()
    main([str(folder), "--extraction", "boxed"])
    new = tmp_path / "made-regraded" / "samples" / old.name
    assert [row["correct"] for row in rows_of(new)] == [False, True, False, True]
    assert [row["answer"] for row in rows_of(new)] == [None, "7", None, "7"]
    assert [row["reward"] for row in rows_of(new)] == [-1, 1, -1, 1]
    judged = {"answer", "correct", "reward", "accuracy_reward", "parts"}
    for earlier, later in zip(rows_of(old), rows_of(new), strict=True):
        assert {k: v for k, v in earlier.items() if k not in judged} == {
            k: v for k, v in later.items() if k not in judged
        }
    assert old.read_bytes() == before
    (saved,) = load_evaluations([str(tmp_path / "made-regraded")])
    assert saved.benchmarks["sums"].settings["grader"]["extraction"] == "boxed"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        "4 responses, 25.0% right before and 50.0% now; 2 became right, 1 wrong, 0 without a verdict"
    )
    assert lines[1] == "  problem 3, truth '7': right (answer '7'), now wrong (answer None): ...'Answer: 7'"
    assert len(lines) == 1 + 3 + 1
    with pytest.raises(InputError, match="exists, and nothing is written over"):
        main([str(folder)])


def test_without_a_choice_the_saved_grader_judges_again(tmp_path, capsys):
    path = save(tmp_path / "made")
    main([str(path)])
    assert "0 became right, 0 wrong, 0 without" in capsys.readouterr().out
    save(tmp_path / "unknown", settings={})
    with pytest.raises(InputError, match=r"does not say how it was judged; give --config"):
        main([str(tmp_path / "unknown")])
    with pytest.raises(InputError, match="--examples=-1 must be 0 or more"):
        main([str(tmp_path / "unknown"), "--examples", "-1"])
    assert not (tmp_path / "unknown-regraded").exists()


def test_a_runs_steps_and_evaluations_are_judged_by_its_own_file_with_a_reward_of_the_user(tmp_path, capsys):
    run = tmp_path / "run"
    for kind, step in (("training", 1), ("training", 2), ("evaluation", 2)):
        save(run, kind, step, settings={})
    raw = {"output_dir": str(run), "num_steps": 2, "model": {"path": "m"}, "data": {"train": {"path": "t"}}}
    (run / "config.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "mine.py").write_text(REWARD)
    main([str(run), f"reward.function={tmp_path / 'mine.py'}:score", "--output", str(tmp_path / "new")])
    lines = capsys.readouterr().out.splitlines()
    counts = [line for line in lines if not line.startswith(" ")]
    assert counts[0].startswith(
        "training steps: 8 responses, 25.0% right before and 25.0% now; 2 became right, 2 wrong"
    )
    assert counts[1].startswith("samples/evaluation_00000002: 4 responses")
    for path in (tmp_path / "new" / "samples").iterdir():
        assert [row["reward"] for row in rows_of(path)] == [len(text) for text in SAID]
        assert [row["correct"] for row in rows_of(path)] == [False, True, False, False]


def test_a_response_that_cannot_be_scored_has_no_verdict_and_no_half_written_folder_stays(tmp_path, capsys):
    save(tmp_path / "made")
    (tmp_path / "mine.py").write_text(
        "def score(records):\n    if any('boxed' in r['response'] for r in records):\n        raise OSError('away')\n"
        "    return [{'score': 1.0, 'correct': True} for r in records]\n"
    )
    own = f"reward.function={tmp_path / 'mine.py'}:score"
    main([str(tmp_path / "made"), own])
    rows = rows_of(tmp_path / "made-regraded" / "samples" / "evaluation_00000000.parquet")
    assert [row["correct"] for row in rows] == [True, None, True, None]
    assert [row["reward"] for row in rows] == [1, None, 1, None]
    shown = capsys.readouterr().out
    assert "1 became right, 0 wrong, 2 without a verdict" in shown
    assert "away" in shown
    shutil.rmtree(tmp_path / "made-regraded")
    broken = samples_folder(tmp_path / "made") / "evaluation_00000001.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"cannot be read .*; give .* whole$"):
        main([str(tmp_path / "made")])
    assert not [path for path in tmp_path.iterdir() if "regraded" in path.name]


def test_results_of_a_benchmark_are_measured_again(tmp_path):
    settings = {**SETTINGS, "benchmark": "gsm8k", "num_problems": 1, "k": 4, "model_sha256": "1"}
    save(tmp_path / "made" / "gsm8k", settings=settings)
    main([str(tmp_path / "made"), "--extraction", "auto"])
    results = json.loads((tmp_path / "made-regraded" / "results.json").read_text())["benchmarks"]["gsm8k"]
    assert results["settings"]["grader"]["extraction"] == "auto"
    assert results["metrics"]["pass@1"]["value"] == 0.5
