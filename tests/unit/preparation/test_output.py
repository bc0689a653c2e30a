"""Prepared datasets: rows, dropped rows and card appear together, and a card fits its rows only."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dapo_mega.errors import InputError
from dapo_mega.preparation.card import CARD, DATA, Card, read_card, verified_card
from dapo_mega.preparation.folders import complete_folder
from dapo_mega.preparation.output import new_dataset, read_dataset


def row(number: int) -> dict[str, object]:
    return {
        "data_source": "sums",
        "prompt": [{"content": f"What is {number} + 1?", "role": "user"}],
        "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
        "level": number,
    }


def write(
    folder: Path, num_rows: int = 3, parent: Card | None = None, *, force: bool = False, interrupted: bool = False
) -> Card:
    with new_dataset(folder, "jsonl", force=force) as writer:
        for number in range(num_rows):
            writer.keep(row(number))
        if interrupted:
            raise KeyboardInterrupt
        writer.drop("no answer", "the field is null", "a.jsonl, line 7", {"prompt": "1 + ?", "answer": float("nan")})
        return writer.finish("a test", settings={"seed": 1}, versions={"rule": "1"}, parent=parent)


def test_what_was_written_is_read_and_named_as_parent(tmp_path: Path) -> None:
    first = write(tmp_path / "first")
    card, rows = read_dataset(tmp_path / "first")
    assert card == first == read_card(tmp_path / "first" / CARD)
    assert list(rows) == [row(0), row(1), row(2)]
    assert (card.num_rows_read, card.num_rows, card.dropped) == (4, 3, {"no answer": 1})
    assert [json.loads(line) for line in (tmp_path / "first" / "dropped.jsonl").read_text().splitlines()] == [
        {
            "reason": "no answer",
            "evidence": "the field is null",
            "where": "a.jsonl, line 7",
            "row": {"prompt": "1 + ?", "answer": "nan"},
        }
    ]
    write(tmp_path / "second", num_rows=2, parent=card)
    successor = read_dataset(tmp_path / "second")[0]
    assert successor.parent == first
    again = write(tmp_path / "again" / "first")
    assert again == first
    for name in (CARD, DATA, "dropped.jsonl"):
        assert (tmp_path / "again" / "first" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


def test_columns_get_one_type_whatever_rows_hold(tmp_path: Path) -> None:
    values = [
        {"same": 1, "wider": 1, "mixed": 1, "late": None, "record": {"a": 1}, "list": [], "big": 2**70, "empty": {}},
        {"same": 2, "wider": 0.5, "mixed": ["x"], "late": "x", "record": {"b": "y"}, "list": [1.5], "big": 1},
        {"same": 3, "wider": None, "mixed": "x", "late": "x\ud800", "record": {}, "list": None, "big": None},
    ]
    with new_dataset(tmp_path / "x") as writer:
        for value in values:
            writer.keep(value)
        card = writer.finish("a test", settings={}, versions={})
    table = pq.read_table(tmp_path / "x" / DATA)
    assert table.column("same").to_pylist() == [1, 2, 3]
    assert table.column("wider").to_pylist() == [1.0, 0.5, None]
    assert table.column("mixed").to_pylist() == ["1", '["x"]', "x"]
    assert table.column("late").to_pylist() == [None, "x", "x\N{REPLACEMENT CHARACTER}"]
    assert table.column("record").to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": "y"}, {"a": None, "b": None}]
    assert table.column("list").to_pylist() == [[], [1.5], None]
    assert table.column("big").to_pylist() == [str(2**70), "1", None]
    assert table.column("empty").to_pylist() == [None] * 3
    assert card.details == {"columns_of_mixed_types": ["mixed", "big"]}


def test_rows_that_changed_after_the_card_are_refused(tmp_path: Path) -> None:
    assert verified_card(tmp_path) is None
    write(tmp_path / "x")
    file = tmp_path / "x" / DATA
    reference = verified_card(file)
    assert reference is not None
    assert reference == verified_card(tmp_path / "x")
    assert reference.sha256 == hashlib.sha256((tmp_path / "x" / CARD).read_bytes()).hexdigest()
    assert verified_card(tmp_path / "x" / "dropped.jsonl") is None
    table = pq.read_table(file)
    pq.write_table(table.slice(1), file)
    with pytest.raises(InputError, match=r"is not the file that its card describes.*prepare the dataset again"):
        verified_card(file)
    file.unlink()
    with pytest.raises(InputError, match="which is missing"):
        verified_card(tmp_path / "x")
    for text, message in (("{}", "is not the card"), ("[", "not valid JSON")):
        (tmp_path / "x" / CARD).write_text(text)
        with pytest.raises(InputError, match=message):
            read_card(tmp_path / "x" / CARD)


def test_nothing_is_half_written_and_nothing_of_others_replaced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no row is left; dropped: 1 no answer"):
        write(tmp_path / "x", num_rows=0)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", interrupted=True)
    with pytest.raises(InputError, match=r"a row holds a bytes.*columns.extra"), new_dataset(tmp_path / "x") as writer:
        writer.keep({"image": b"png"})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(InputError, match="did not write"):
        write(tmp_path / "mine", force=True)
    write(tmp_path / "x")
    with pytest.raises(InputError, match="--force"):
        write(tmp_path / "x")
    assert write(tmp_path / "x", num_rows=1, force=True).num_rows == 1


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    killed = (
        "import os, sys; from pathlib import Path; from dapo_mega.preparation.folders import complete_folder\n"
        "with complete_folder(Path(sys.argv[1])): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "out")], check=True, timeout=100)
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    with complete_folder(tmp_path / "out"):
        living = list(tmp_path.iterdir())
        assert len(living) == 1
        assert living != left
        write(tmp_path / "out")
        assert set(living) < set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
