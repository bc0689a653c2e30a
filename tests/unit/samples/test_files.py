"""Files of samples: `datasets` reads them, tokens show their text, old files go first, a full disk ends no run."""

import errno
import json
import logging
from dataclasses import fields
from types import MappingProxyType

import numpy as np
import pyarrow.parquet as pq
import pytest

from dapo_mega.config import SamplesConfig
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.samples import files, recorder
from dapo_mega.samples.files import discard_after, rotate, stored_files, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import SampleFile, Training, rows_of, rows_of_evaluation, rows_of_group
from dapo_mega.samples.table import account_of, to_table
from dapo_mega.types import Group, GroupFate, Prompt, Response, Trajectory
from tests.made_trajectories import scored_answer

TOKENIZER = build_byte_tokenizer()
TEXT = "Größe 😀 = </script>\u2028"


def tokens(text):
    return np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)


PROMPT = Prompt(4, "Was ist 1+1? \ud800", tokens("Was ist 1+1?"), "2")


def scored(request_id, text=TEXT, correct=True):
    ids = np.append(tokens(text), TOKENIZER.eos_token_id).astype(np.int32)
    logprobs = np.linspace(-3, -1e-7, len(ids), dtype=np.float32)
    response = Response(request_id, ids, logprobs, "stop", 7, ((7, 3), (8, len(ids))), (("http://engine", len(ids)),))
    return scored_answer(response, text, correct, 1.0, 0.75, "2", MappingProxyType({"format": 0.5}))


def unscored(request_id):
    given = vars(scored(request_id))
    return Trajectory(**{f.name: given[f.name] for f in fields(Trajectory)})


def step_file(step, kind="training"):
    group = Group(PROMPT, (scored(8), scored(9, correct=None)))
    rows = list(rows_of_group(group))
    rows += rows_of(GroupFate("expired", PROMPT, unscored=(unscored(12),)))
    return SampleFile(step, kind, rows, {"groups": {"trained": 1, "expired": 1}})


def table(step=3):
    return to_table(step_file(step), TokenPieces(TOKENIZER))


def test_datasets_reads_several_files_with_all_values(tmp_path):
    from datasets import load_dataset

    file = step_file(1)
    file.rows[0] = type(file.rows[0])(
        **{
            **vars(file.rows[0]),
            "outcome": "trained",
            "training": Training(0, -0.5, True, file.rows[0].trajectory.logprobs - 0.25),
        }
    )
    write_table(tmp_path / "step_00000001.parquet", to_table(file, TokenPieces(TOKENIZER)))
    write_table(tmp_path / "step_00000002.parquet", table(2))
    data = load_dataset("parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=tmp_path / "cache")
    assert [(row["step"], row["group"], row["outcome"]) for row in data] == [
        (1, 8, "trained"), (1, 8, None), (1, 12, "expired"), (2, 8, None), (2, 8, None), (2, 12, "expired"),
    ]  # fmt: skip
    first, second, expired = data[0], data[1], data[2]
    source = file.rows[0].trajectory
    assert (first["response"], first["correct"], first["reward"], first["answer"]) == (TEXT, True, 0.75, "2")
    assert (first["parts"], first["advantage"]) == ([{"name": "format", "value": 0.5}], -0.5)
    assert first["version_spans"] == [{"version": 7, "end": 3}, {"version": 8, "end": len(source.token_ids)}]
    assert np.array_equal(np.float32(first["engine_logprobs"]), source.logprobs)
    assert np.array_equal(np.float32(first["trainer_logprobs"]), source.logprobs - np.float32(0.25))
    assert first["token_ids"] == source.token_ids.tolist()
    assert first["prompt"] == "Was ist 1+1? ?"  # A lone surrogate cannot be written.
    assert (second["correct"], second["trainer_logprobs"]) == (None, None)
    assert (expired["reward"], expired["response"]) == (None, TEXT + "</s>")


def test_tokens_joined_are_the_text_and_characters_of_several_tokens_stay_whole():
    ids = np.append(tokens(TEXT), TOKENIZER.eos_token_id).astype(np.int32)
    pieces = TokenPieces(TOKENIZER).of(ids).to_pylist()
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TEXT + "</s>"
    assert "😀" in pieces
    assert pieces[-1] == "</s>"


def test_the_account_of_the_step_stands_in_the_file(tmp_path):
    write_table(tmp_path / "step_00000003.parquet", table())
    account = account_of(pq.read_metadata(tmp_path / "step_00000003.parquet").metadata)
    assert account == {"format": 1, "step": 3, "kind": "training", "groups": {"trained": 1, "expired": 1}}


def test_the_oldest_steps_go_first_and_evaluations_last(tmp_path):
    names = [f"step_{step:08d}.parquet" for step in (9, 10, 11)] + ["evaluation_00000000.parquet"]
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 100)
    (tmp_path / "notes.txt").write_text("stays")
    assert rotate(tmp_path, 400) == []
    assert [path.name for path in rotate(tmp_path, 399)] == [names[0]]
    assert [path.name for path in rotate(tmp_path, 1)] == [names[1]]
    (tmp_path / "evaluation_00000011.parquet").write_bytes(b"x" * 100)
    assert [path.name for path in rotate(tmp_path, 1)] == ["evaluation_00000000.parquet"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "evaluation_00000011.parquet", "notes.txt", "step_00000011.parquet",
    ]  # fmt: skip


def test_what_comes_after_the_resumed_step_is_removed(tmp_path):
    for name in ("step_00000004.parquet", "evaluation_00000004.parquet", "step_00000005.parquet"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "step_00000005.parquet.tmp").write_bytes(b"torn")
    assert discard_after(tmp_path, 4) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation_00000004.parquet", "step_00000004.parquet"]


@pytest.fixture
def full_disk(monkeypatch):
    """`full_disk(False)` frees it."""
    is_full = [True]
    write = files.pq.ParquetWriter.write_table

    def refuse(*arguments, **settings):
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments, **settings)

    monkeypatch.setattr(files.pq.ParquetWriter, "write_table", refuse)
    return lambda full: is_full.__setitem__(0, full)


def test_a_full_disk_is_one_warning_and_later_steps_are_written(tmp_path, full_disk, caplog):
    subject = recorder.SampleRecorder(str(tmp_path), SamplesConfig(), TOKENIZER, 0)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            subject.write(step_file(step))
        subject.flush()
    assert [record.message.count("No space left on device") for record in caplog.records] == [1]
    assert list((tmp_path / "samples").iterdir()) == []
    full_disk(False)
    subject.write(step_file(3))
    subject.write(step_file(3, "evaluation"))
    subject.close()
    assert [(file.step, file.is_evaluation) for file in stored_files(tmp_path / "samples")] == [(3, False), (3, True)]


def test_an_evaluation_is_written_whole_also_what_could_not_be_scored():
    other = Prompt(5, "2+2?", tokens("2+2?"), "4")
    results = [
        (PROMPT, unscored(8)),
        (PROMPT, scored(9)),
        (other, unscored(10)),
    ]
    rows = to_table(SampleFile(3, "evaluation", rows_of_evaluation(results)), TokenPieces(TOKENIZER)).to_pylist()
    assert [(row["group"], row["request_id"], row["correct"], row["reward"]) for row in rows] == [
        (8, 8, None, None), (8, 9, True, 0.75), (10, 10, None, None),
    ]  # fmt: skip
    assert all(row["response"].startswith(TEXT) and row["outcome"] is None for row in rows)


def test_the_schema_is_the_same_whatever_the_rows_hold():
    """So any files of any runs can be joined."""
    empty = to_table(SampleFile(1, "training", []), TokenPieces(TOKENIZER))
    assert empty.schema.equals(table().schema)
    assert json.loads(json.dumps(empty.to_pylist())) == []
