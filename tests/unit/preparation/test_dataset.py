"""A dataset from messy sources: every row is kept or counted with its evidence, and equal input gives equal bytes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from dapo_mega.commands import prepare
from dapo_mega.config import DatasetConfig, PreparationConfig
from dapo_mega.config.files import configured
from dapo_mega.data.prompts import load_prompts
from dapo_mega.data.templates import TEMPLATES
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.preparation.card import Card
from dapo_mega.preparation.dataset import prepare_dataset

PROJECT = Path(__file__).resolve().parents[3]
STORY = "Ann has 12 red apples and buys 30 green pears on the market today. How many fruits does Ann have now?"

Prepare = Callable[..., Card]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    def call(sources: dict[str, Any], dropped: str | None = "jsonl", **sections: Any) -> Card:
        config = configured(PreparationConfig, {"sources": sources, **sections}, [])
        return prepare_dataset(config, tmp_path / "out", dropped, force=True)[0]

    return call


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dropped(folder: Path) -> list[tuple[str, str, str]]:
    rows = [json.loads(line) for line in (folder / "out" / "dropped.jsonl").read_text().splitlines()]
    return [(row["reason"], row["where"], row["evidence"]) for row in rows]


def test_every_row_is_kept_or_dropped_with_its_reason_and_evidence(prepared: Prepare, tmp_path: Path) -> None:
    rows = [
        {"problem": "What is $1+1$?", "answer": 2, "level": 1},
        {"problem": "What  is \\(1 + 1\\)?", "answer": 2},
        {"problem": "What is $1+1$ ?", "answer": 3},
        {"problem": STORY, "answer": "42"},
        {"problem": STORY.replace("today", "then"), "answer": "42"},
        {"problem": STORY.replace("12", "13"), "answer": "43"},
        {"problem": "Bob says: compute the sum of all positive divisors of 360 quickly!", "answer": "1170"},
        {"problem": "Find $x$. (A) 1 (B) 2 (C) 3", "answer": "B"},
        {"problem": "", "answer": "1"},
        {"problem": None, "answer": "1"},
        {"answer": "1"},
        {"problem": float("nan"), "answer": "1"},
        {"problem": 7, "answer": "1"},
        {"problem": {"text": "x"}, "answer": "1"},
        {"problem": "What is \ud800?", "answer": "1"},
        {"problem": "What is 4?", "answer": None},
        {"problem": "What is 5?", "answer": float("nan")},
        {"problem": "What is 6?", "answer": "\\frac{1}{"},
        {"problem": "What is 7?", "answer": {"value": 1}},
        {"problem": "x" * 200_000, "answer": "1"},
    ]
    tests = lines(tmp_path / "test.jsonl", [{"question": "Compute the sum of all positive divisors of 360."}])
    columns = {"prompt": "problem", "ground_truth": "answer"}
    card = prepared(
        {"mine": {"path": lines(tmp_path / "a.jsonl", rows), "columns": columns}},
        filters={"multiple_choice": True},
        decontamination={"sets": {"divisors": {"path": tests}}},
        max_invalid_share=0.6,
    )
    assert (card.num_rows_read, card.num_rows) == (20, 3)
    assert card.dropped == {
        "answer cannot be parsed": 2,
        "contaminated": 1,
        "exact duplicate": 2,
        "multiple choice": 1,
        "near duplicate": 1,
        "no answer": 2,
        "no prompt": 4,
        "prompt is no text": 3,
        "too many characters": 1,
    }
    assert dict(card.sources[0].dropped) == card.dropped
    assert card.details["duplicates_with_another_answer"] == 1
    found = {where.rpartition(" ")[2]: (reason, evidence) for reason, where, evidence in dropped(tmp_path)}
    assert found["2"] == ("exact duplicate", "of mine/a.jsonl, line 1")
    assert found["3"][1] == "of mine/a.jsonl, line 1, which has another answer than this row: 3"
    assert found["5"][1].endswith(" to mine/a.jsonl, line 4")
    shown = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert {line["where"]: line["row"] for line in shown}["mine/a.jsonl, line 5"] == rows[4]
    assert found["7"][1].startswith("100% of divisors/test.jsonl, line 1 stands here")
    assert "compute the sum of all positive divisors of 360" in found["7"][1]
    assert found["8"] == ("multiple choice", "(A) 1 (B) 2 (C) 3")
    assert found["18"][1].startswith("ground truth '\\\\frac{1}{' cannot be compared")
    assert len(found) + card.num_rows == 20
    table = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert table[0] == {
        "data_source": "mine",
        "prompt": [{"content": "What is $1+1$?", "role": "user"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "level": 1,
    }
    # The defaults of training read the file.
    dataset = load_prompts(DatasetConfig(path=str(tmp_path / "out")), build_byte_tokenizer(), 2000)
    assert [prompt.ground_truth for prompt in dataset.prompts] == ["2", "42", "43"]


def test_all_formats_and_instructions_give_one_dataset(prepared: Prepare, tmp_path: Path) -> None:
    instructed = [TEMPLATES["dapo"].format(problem="What is 2+2?"), "What is 3+3?"]
    table = pa.table({"prompt": instructed, "answer": ["4", "6"], "data_source": ["x", None]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    rows = table.to_pylist()
    lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.csv.write_csv(table, tmp_path / "a.csv")
    contents = set()
    for suffix in ("parquet", "arrow", "jsonl", "json", "csv"):
        source = {"path": str(tmp_path / f"a.{suffix}"), "columns": {"ground_truth": "answer"}}
        card = prepared({"sums": source}, dropped=None)
        assert card.details["instructions_taken_off"] == 1, suffix
        contents.add((tmp_path / "out" / "train.parquet").read_bytes())
    assert len(contents) == 1
    assert [
        (r["data_source"], r["prompt"][0]["content"])
        for r in pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    ] == [
        ("x", "What is 2+2?"),
        ("sums", "What is 3+3?"),
    ]


def test_sources_with_too_many_invalid_rows_are_refused(prepared: Prepare, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i}+1?", "answer": "" if i < 2 else str(i)} for i in range(10)]
    source = {"path": lines(tmp_path / "a.jsonl", rows), "columns": {"ground_truth": "answer"}}
    assert prepared({"a": source}, max_invalid_share=0.2).num_rows == 8
    with pytest.raises(InputError, match=r"2 of 10 rows of source a are invalid \(2 no answer\).*a/a\.jsonl, line 1"):
        prepared({"a": source}, max_invalid_share=0.19)
    many = lines(tmp_path / "b.jsonl", [{"text": "x", "answer": "1"}] * 1500)
    with pytest.raises(InputError, match=r"1000 of 1000 rows of source b .*column 'prompt' is absent"):
        prepared({"b": {**source, "path": many}}, max_invalid_share=1.0)
    both = lines(tmp_path / "c.jsonl", [{"a.b": "x", "a": {"b": "y"}}])
    with pytest.raises(InputError, match=r"a column 'a\.b' and a column 'a' with a field 'b'"):
        prepared({"c": {"path": both, "columns": {"prompt": "a.b"}}})
    with pytest.raises(InputError, match=r"columns\.prompt and columns\.ground_truth are both 'answer'"):
        prepared({"a": {**source, "columns": {"prompt": "answer", "ground_truth": "answer"}}})


def test_a_broken_file_is_named_and_refused_or_skipped(prepared: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    good = [{"prompt": f"What is {word}?", "answer": "1"} for word in ("one", "two")]
    lines(folder / "a.jsonl", good[:1])
    lines(folder / "b.jsonl", good[1:])
    (folder / "b.jsonl").open("a").write('{"prompt": "cut')
    (folder / "c.parquet").write_text("no parquet")
    source = {"mine": {"path": str(folder), "columns": {"ground_truth": "answer"}}}
    with pytest.raises(InputError, match=r"b\.jsonl, line 2 is not valid JSON .*broken_files=skip"):
        prepared(source)
    assert not (tmp_path / "out").exists()
    card = prepared(source, broken_files="skip")
    assert card.num_rows == 2
    broken = card.details["broken_files"]
    assert list(broken) == ["mine/c.parquet, after 0 rows"]
    assert card.dropped["cannot be read"] == 1
    assert card.details["examples"]["cannot be read"][0].startswith("mine/b.jsonl, line 2: is not valid JSON")


def _parquet_with_a_broken_group(path: Path, good: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(good), path, row_group_size=2, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)


def test_only_what_cannot_be_read_is_skipped_and_each_row_of_it_is_counted(prepared: Prepare, tmp_path: Path) -> None:
    good = [{"prompt": f"Say {word} as it is.", "answer": "1"} for word in ("one", "two", "three", "four", "five")]
    a, b, c, d, e = (json.dumps(row).encode() + b"\n" for row in good)
    broken = [b'{"prompt": "cut\n', b"5\n", b'{"prompt": "\xff?", "answer": 1}\n', b'{"a": 1, "a": 2}\n']
    broken.append(b"[" * 99999 + b"\n")
    cells = [f"{row['prompt']},1\n".encode() for row in good]
    quoted = b'"Say four as it is.",1\n'
    files = {
        "x.jsonl": (a + broken[0] + broken[1] + b + broken[2] + c + broken[3] + d + broken[4] + e + b"{", 6, 5),
        "x.json": (b"[" + b",".join([a, broken[3], b, b"5", c, d, b'{"x": {"a": 1, "a": [1]}}', e]) + b"]", 3, 5),
        "lines.json": (b"[" + b",".join([a, b, broken[0], c, b'{"a": 1\n', d, b"{]\n", e]) + b"]", 3, 5),
        "deep.json": (
            json.dumps([*good[:2], {"x": {"prompt": 1}}, *good[2:]], indent=1).encode().replace(b": 1\n", b": 1,\n"),
            *(1, 5),
        ),
        "x.csv": (
            b"prompt,answer\n" + cells[0] + b'"open,1\n' + cells[1] + cells[2] + quoted + b"x,1,2\n" + b"\xff,1\n"
            b'"a"b,1\n' + cells[4] + b'"cut off,\n',
            *(5, 5),
        ),
        "x.parquet": (b"", 2, 3),
    }
    for name, (content, num_broken, num_good) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        if name == "x.parquet":
            _parquet_with_a_broken_group(path, good)
        source = {"mine": {"path": str(path), "columns": {"ground_truth": "answer"}}}
        with pytest.raises(InputError, match=rf"{name}.*broken_files=skip"):
            prepared(source)
        card = prepared(source, broken_files="skip")
        counts = (card.num_rows, card.dropped["cannot be read"], card.num_rows_read, card.details["broken_files"])
        assert counts == (num_good, num_broken, num_good + num_broken, {}), name
        found = dropped(tmp_path)
        assert [reason for reason, _, _ in found] == ["cannot be read"] * num_broken
        assert all(what and where.startswith("mine") and str(tmp_path) not in what for _, where, what in found), name


def test_the_same_input_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{STORY} {word} {i % 70}", "answer": i % 70, "e": {word: i}} for i, word in enumerate("abcd" * 50)
    ]
    recipe = "sources:\n  a:\n    path: a.jsonl\n    columns: {ground_truth: answer}\n"
    results = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        lines(folder / "a.jsonl", rows)
        (folder / "prepare.yaml").write_text(recipe)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(PROJECT)}
        command = [sys.executable, str(PROJECT / "tools" / "prepare_data.py"), "dataset", "--config", "prepare.yaml"]
        subprocess.run(
            [*command, "--output", "out", "--dropped", "parquet"], cwd=folder, env=environment, check=True, timeout=120
        )
        results.append({file.name: file.read_bytes() for file in (folder / "out").iterdir()})
    assert results[0] == results[1]
    assert set(results[0]) == {"train.parquet", "dropped.parquet", "card.json"}
    assert json.loads(results[0]["card.json"])["dropped"].keys() == {"exact duplicate", "near duplicate"}


def test_the_command_takes_files_or_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"What is {word}?", "answer": f"so #### {i}"} for i, word in enumerate(("one", "two", "two"))]
    path = lines(tmp_path / "mine.jsonl", rows)
    short = ["dataset", path, "--prompt-column", "question", "--answer-column", "answer", "--answer-style", "gsm8k"]
    prepare.main([*short, "--output", str(tmp_path / "short"), "duplicates.near=false"])
    printed = capsys.readouterr().out
    assert "2 of 3 rows\n  1 exact duplicate, such as mine/mine.jsonl, line 3: of mine/mine.jsonl, line 2" in printed
    prepare.main([*short, "--output", str(tmp_path / "short"), "duplicates.near=false"])
    assert "already there" in capsys.readouterr().out
    with pytest.raises(InputError, match="holds a prepared dataset already; use --force"):
        prepare.main([*short, "--output", str(tmp_path / "short")])
    recipe = tmp_path / "prepare.yaml"
    recipe.write_text("sources:\n  mine: {path: absent.jsonl, ground_truth_style: gsm8k}\nduplicates: {near: false}\n")
    columns = ["sources.mine.columns.prompt=question", "sources.mine.columns.ground_truth=answer"]
    prepare.main(
        ["dataset", "--config", str(recipe), "--output", str(tmp_path / "long"), f"sources.mine.path={path}", *columns]
    )
    for name in ("train.parquet", "card.json"):
        assert (tmp_path / "long" / name).read_bytes() == (tmp_path / "short" / name).read_bytes()
    output = ["--output", str(tmp_path / "x")]
    dataset = ["dataset", path, *output]
    mistakes = {
        "give the sources as FILE or in a recipe": ["dataset", *output],
        "unknown key 'filters.prof'; did you mean 'filters.proofs'": [*dataset, "filters.prof=true"],
        "threshold.*less than or equal to 1": [*dataset, "duplicates.threshold=2"],
        "filters.tokenizer and filters.max_prompt_tokens go together": [
            "dataset",
            path,
            "filters.tokenizer=x",
            *output,
        ],
        "dataset .*/absent.jsonl does not exist": [
            "dataset",
            path,
            *output,
            "--decontaminate",
            "absent.jsonl",
        ],
    }
    for message, arguments in mistakes.items():
        with pytest.raises(InputError, match=message):
            prepare.main(arguments)
    assert not (tmp_path / "x").exists()
