"""Every supported file gives the same rows, and what cannot be read says where and what to do."""

import datetime
import io
import json
import os
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_mega.config import DatasetConfig
from dapo_mega.data.ground_truths import ground_truth_text
from dapo_mega.data.json_lists import list_items
from dapo_mega.data.readers import read_rows
from dapo_mega.errors import InputError

RECORDS = [{"prompt": f"{i}+1=", "meta": {"answer": str(i + 1), "tags": ["a", "b"]}} for i in range(5)]


def _rows(path: Path, **options: object) -> list[dict]:
    return [dict(row.values) for row in read_rows(DatasetConfig(path=str(path), **options))]


def _write_jsonl(path: Path, records: list) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def _write_parquet(path: Path, records: list) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def _write_arrow(path: Path, kind: str) -> Path:
    table = pa.Table.from_pylist(RECORDS)
    opened = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with opened(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


WRITERS = {
    "parquet": lambda d: _write_parquet(d / "x.parquet", RECORDS),
    "jsonl": lambda d: _write_jsonl(d / "x.jsonl", RECORDS),
    "json lines named json": lambda d: _write_jsonl(d / "x.json", RECORDS),
    "json list": lambda d: _text(d / "x.json", json.dumps(RECORDS)),
    "json under a key": lambda d: _text(d / "x.json", json.dumps({"version": 1, "tags": ["a"], "data": RECORDS})),
    "json by split": lambda d: _text(d / "x.json", json.dumps({"test": RECORDS[:1], "train": RECORDS})),
    "json with a byte order mark": lambda d: _text(d / "x.json", "\ufeff" + json.dumps(RECORDS)),
    "arrow stream": lambda d: _write_arrow(d / "x.arrow", "stream"),
    "arrow file": lambda d: _write_arrow(d / "x.arrow", "file"),
}


def _text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_every_format_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path)
    assert _rows(path) == RECORDS
    assert _rows(path, max_rows=2) == RECORDS[:2]
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "reading leaves nothing behind"


@pytest.mark.parametrize("as_splits", [False, True])
def test_a_saved_dataset_is_read(as_splits: bool, tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(RECORDS)
    (datasets.DatasetDict({"train": saved}) if as_splits else saved).save_to_disk(tmp_path / "saved")
    assert _rows(tmp_path / "saved") == RECORDS
    columns = read_rows(DatasetConfig(path=str(tmp_path / "saved")), ["meta.answer"])
    assert [row.values for row in columns] == [{"meta": record["meta"]} for record in RECORDS]
    if as_splits:
        with pytest.raises(InputError, match="set split to one of train"):
            _rows(tmp_path / "saved", split="test")


def test_a_folder_is_read_in_the_order_of_its_file_names(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "part-2.jsonl", RECORDS[3:])
    _write_parquet(tmp_path / "part-0.parquet", RECORDS[:2])
    _text(tmp_path / "part-1.json", json.dumps(RECORDS[2:3]))
    _text(tmp_path / "README.md", "not data")
    assert _rows(tmp_path) == RECORDS


def test_a_folder_with_splits_gives_only_the_one_asked_for(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "train-00000-of-00001.jsonl", RECORDS[:3])
    _write_parquet(tmp_path / "test.parquet", RECORDS[3:])
    _text(tmp_path / "preparation.json", "{}")
    assert _rows(tmp_path) == RECORDS[:3]
    assert _rows(tmp_path, split="test") == RECORDS[3:]
    with pytest.raises(InputError, match="only test, train"):
        _rows(tmp_path, split="eval")


def test_numbers_in_json_keep_their_digits(tmp_path: Path) -> None:
    numbers = ["27.0", "0.10", "12345678901234567890123", "1e400", "-7", "9" * 5000]
    path = _text(tmp_path / "x.jsonl", "\n".join(f'{{"answer": {number}}}' for number in numbers))
    assert [row["answer"] for row in _rows(path)] == numbers


def test_a_csv_file_is_text_under_the_names_of_its_first_line(tmp_path: Path) -> None:
    path = _text(tmp_path / "x.csv", '\ufeffproblem,answer\n"What is\n1,5 + 1,5?",3\n\nWhat is 7?,07\n')
    rows = list(read_rows(DatasetConfig(path=str(path))))
    assert [row.values for row in rows] == [
        {"problem": "What is\n1,5 + 1,5?", "answer": "3"},
        {"problem": "What is 7?", "answer": "07"},
    ]
    assert [row.where for row in rows] == [f"{path}, line 3", f"{path}, line 5"]


def test_a_json_list_is_read_in_pieces_whatever_stands_at_their_ends(tmp_path: Path) -> None:
    # Pieces of two to nine characters cut strings, numbers, escapes and white space everywhere.
    records = [{"a": [1, -20, 3.5], "b": 'x"],[{\\ ü'}, {}, {"c": {"d": None}}, 12345, -6.75, "text", True]
    text = json.dumps(records, ensure_ascii=False, indent=1) + "\n "
    for size in range(2, 10):
        assert list(list_items(io.StringIO(text), "x", json.JSONDecoder(), size)) == records
    assert list(list_items(io.StringIO(" [ ] "), "x", json.JSONDecoder())) == []


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(InputError, match="several columns 'a'; rename all but one"):
        _rows(path)


@pytest.mark.parametrize("in_list", [False, True])
def test_repeated_fields_of_a_column_are_refused_by_name(tmp_path: Path, in_list: bool) -> None:
    twice = pa.StructArray.from_arrays([pa.array(["1", "2"]), pa.array(["3", "4"])], names=["b", "b"])
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2]), twice) if in_list else twice
    pq.write_table(pa.Table.from_arrays([column], names=["a"]), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet has several columns '\w+\.b'; rename all but one"):
        _rows(tmp_path / "x.parquet")


def test_columns_are_reached_by_dotted_name_and_unasked_ones_are_not_read(tmp_path: Path) -> None:
    path = _write_parquet(tmp_path / "x.parquet", [{**record, "a.b": i} for i, record in enumerate(RECORDS)])
    rows = list(read_rows(DatasetConfig(path=str(path)), ["meta.answer", "a.b"]))
    assert [row.value("meta.answer", "columns.x") for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row.value("a.b", "columns.x") for row in rows] == [0, 1, 2, 3, 4]
    assert "prompt" not in rows[0].values


def test_a_place_names_file_and_row_or_line(tmp_path: Path) -> None:
    parquet = _write_parquet(tmp_path / "x.parquet", RECORDS)
    lines = _text(tmp_path / "x.jsonl", '\n{"a": 1}\n\n{"a": 2}\n')
    assert [row.where for row in read_rows(DatasetConfig(path=str(parquet)))][-1] == f"{parquet}, row 4"
    assert [row.where for row in read_rows(DatasetConfig(path=str(lines)))] == [f"{lines}, line 2", f"{lines}, line 4"]


def test_an_absent_column_names_those_there_are_and_the_nearest(tmp_path: Path) -> None:
    path = _write_parquet(tmp_path / "x.parquet", RECORDS)
    with pytest.raises(InputError, match=r"prompt, meta; did you mean 'prompt'\?"):
        list(read_rows(DatasetConfig(path=str(path)), ["promt"]))
    row = next(read_rows(DatasetConfig(path=str(path))))
    with pytest.raises(InputError, match=r"row 0 .*meta\.answer, meta\.tags; did you mean 'meta\.answer'\?"):
        row.value("meta.answr", "columns.ground_truth")
    with pytest.raises(InputError, match=r"set columns\.ground_truth to one of them"):
        row.value("zzz", "columns.ground_truth")


WRONG_FILES = {
    "x.jsonl": ('{"a": 1}\n{"a": \n', "x.jsonl, line 2 is not valid JSON"),
    "list.jsonl": ("[1]\n", "line 1 is a JSON list"),
    "x.json": ('[{"a": 1},\n{"a": ]', "x.json:2 is not valid JSON"),
    "text.json": ('"text"', "expected a list of records"),
    "two.json": ('{"a": [{}], "b": [{}]}', "lists of records are 'a', 'b'"),
    "none.json": ('{"a": 1}', "lists of records are none"),
    "x.parquet": ("not parquet", "x.parquet cannot be read as parquet"),
    "x.arrow": ("not arrow at all", "x.arrow cannot be read as arrow"),
    "x.tsv": ("a\tb", "ends in '.tsv'"),
    "short.csv": ("a,b\n1,2\n3\n", "short.csv, line 3 has 1 cells under 2 columns"),
    "deep.json": ("[" * 10**5, "deep.json cannot be read as json .maximum recursion depth"),
    "deep.jsonl": ('{"a": ' + "[" * 10**5, "deep.jsonl, line 1 is not valid JSON"),
    "quote.csv": ('a,b\n1,"2\n', "quote.csv, line 2 is not valid CSV"),
    "twice.csv": ("a,a\n1,2\n", "several columns 'a'"),
    "twice.jsonl": ('{"a": 1, "a": 2}\n', "field 'a' stands twice in one record"),
    "twice.json": ('[{"a": 1}, {"a": {"b": 1, "b": 2}}]', "field 'b' stands twice in one record"),
    "cut.json": ('[{"a": 1}, {"a": 2}', "it ends within the list"),
    "rest.json": ('[{"a": 1}] 7', "text after the list's end"),
}


@pytest.mark.parametrize("name", sorted(WRONG_FILES))
def test_an_unreadable_file_is_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    text, expected = WRONG_FILES[name]
    with pytest.raises(InputError, match=expected) as caught:
        _rows(_text(tmp_path / name, text))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_nothing_after_max_rows_is_looked_at(tmp_path: Path) -> None:
    path = _text(tmp_path / "x.jsonl", '{"a": 1}\n{"a": 2}\nbroken\n')
    assert len(_rows(path, max_rows=2)) == 2


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(InputError, match="utf-8"):
        _rows(tmp_path / "x.jsonl")


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "train.jsonl", RECORDS)
    with pytest.raises(InputError, match=r"does not exist; did you mean .*train\.jsonl"):
        _rows(tmp_path / "trian.jsonl")
    with pytest.raises(InputError, match="does not exist; give the path"):
        _rows(tmp_path / "nowhere" / "x.parquet")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no dataset file"):
        _rows(tmp_path)


def test_a_hub_name_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(name: str, configuration: None, split: str) -> None:
        raise ConnectionError(f"Couldn't reach {name!r}\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="could not be loaded from the Hugging Face hub") as caught:
        _rows(Path("nobody/nothing"))
    assert "\n" not in str(caught.value)
    assert "give the path of the files" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_can_be_read(tmp_path: Path) -> None:
    _write_parquet(tmp_path / "x.parquet", RECORDS)
    tmp_path.chmod(0o500)
    assert _rows(tmp_path) == RECORDS


def test_a_hub_name_may_say_which_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name, configuration, split):
        asked.append((name, configuration, split))
        return datasets.Dataset.from_list([{"question": "1+1?"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    for path in ("openai/gsm8k:main", "math-ai/aime25"):
        assert [row.values for row in read_rows(DatasetConfig(path=path, split="test"))] == [{"question": "1+1?"}]
    assert asked == [("openai/gsm8k", "main", "test"), ("math-ai/aime25", None, "test")]


def test_an_object_of_lists_is_read_up_to_a_size_and_lines_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_mega.data.readers._MAX_WHOLE_BYTES", 200)
    (tmp_path / "small.json").write_text(json.dumps({"train": RECORDS[:2]}))
    (tmp_path / "large.json").write_text(json.dumps({"train": RECORDS}))
    _write_jsonl(tmp_path / "lines.json", RECORDS)
    assert len(_rows(tmp_path / "small.json")) == 2
    assert len(_rows(tmp_path / "lines.json")) == len(RECORDS)
    with pytest.raises(InputError, match=r"large\.json is one JSON object of .* GiB are; write its lists to files"):
        _rows(tmp_path / "large.json")


def _written(tmp_path: Path, kind: str, column: pa.Array) -> DatasetConfig:
    table = pa.table({"prompt": [f"{i}?" for i in range(len(column))], "answer": column})
    if kind == "saved":
        datasets.Dataset(table).save_to_disk(tmp_path / "saved")
        return DatasetConfig(path=str(tmp_path / "saved"), columns={"ground_truth": "answer"})
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return DatasetConfig(path=str(path), columns={"ground_truth": "answer"})


NUMBERS = {
    "float32": (
        pa.array([0.1, 72.0, 3.14, -0.0, 1e20, 1e-7], pa.float32()),
        "0.1 72 3.14 0 1" + "0" * 20 + " 0.0000001",
    ),
    "float16": (pa.array(np.array([0.1, 7, 2.5], np.float16)), "0.1 7 2.5"),
    "float64": (
        pa.array([0.1, 72.0, 1e16, 6.02e23, 1 / 3]),
        "0.1 72 1" + "0" * 16 + " 602" + "0" * 21 + " " + repr(1 / 3),
    ),
    "decimal": (
        pa.array([Decimal("72.00"), Decimal("0.1")], pa.decimal128(38, 20)),
        "72." + "0" * 20 + " 0.1" + "0" * 19,
    ),
    "decimal256": (pa.array([Decimal(10**50 + 1)], pa.decimal256(60, 0)), str(10**50 + 1)),
    "int64": (pa.array([2**53 + 1, -(2**63)]), f"{2**53 + 1} {-(2**63)}"),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), str(2**64 - 1)),
    "dictionary": (pa.array([0.1, 0.1], pa.float32()).dictionary_encode(), "0.1 0.1"),
    "list": (pa.array([[0.1, 0.7]], pa.list_(pa.float32())), "0.1,0.7"),
    "text": (pa.array(["\ufeff72", "007"]), "72 007"),
    "texts as JSON": (pa.array(['["34"]', '["a\\u0062", "2"]']), "34 ab,2"),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved"])
def test_a_number_as_truth_is_the_number_that_was_written(kind: str, tmp_path: Path) -> None:
    found = {}
    for name, (column, _) in NUMBERS.items():
        folder = tmp_path / name
        folder.mkdir()
        config = _written(folder, kind, column)
        found[name] = " ".join(ground_truth_text(row, config).replace(", ", ",") for row in read_rows(config))
    assert found == {name: expected for name, (_, expected) in NUMBERS.items()}


NOT_A_TRUTH = {
    "whole number beyond float32": (pa.array([2.0**24 + 2], pa.float32()), "16777218 stands in a column of floats"),
    "whole number beyond float64": (pa.array([2.0**53 + 2]), "9007199254740994 stands in a column of floats"),
    "not a number": (pa.array([float("nan")]), "got nan"),
    "null": (pa.array([None], pa.string()), "got null"),
    "null in a list": (pa.array([["1", None]]), "got ..1., None"),
    "null in JSON": (pa.array(['["1", null]']), "must be text"),
    "record in JSON": (pa.array(['{"answer": "72"}']), "must be text"),
    "nested lists": (pa.array([[[1, 2]]]), "must be text"),
    "date": (pa.array([datetime.date(2024, 5, 1)]), "must be text"),
    "bytes": (pa.array([b"72"]), "must be text"),
    "record": (pa.array([{"a": 1}]), "must be text"),
}


def test_what_is_no_number_or_text_is_no_truth(tmp_path: Path) -> None:
    for name, (column, message) in NOT_A_TRUTH.items():
        folder = tmp_path / name
        folder.mkdir()
        config = _written(folder, "parquet", column)
        with pytest.raises(InputError, match=rf"x\.parquet, row 0: .*{message}"):
            print(name, ground_truth_text(next(read_rows(config)), config))


def test_other_columns_have_the_numbers_that_were_written(tmp_path: Path) -> None:
    record = pa.array([{"x": [0.1], "y": "a"}, None], pa.struct({"x": pa.list_(pa.float32()), "y": pa.string()}))
    pairs = pa.array([[("k", 0.1)], None], pa.map_(pa.string(), pa.float32()))
    pq.write_table(pa.table({"record": record, "pairs": pairs}), tmp_path / "x.parquet")
    assert _rows(tmp_path / "x.parquet") == [
        {"record": {"x": [0.1], "y": "a"}, "pairs": [("k", 0.1)]},
        {"record": None, "pairs": None},
    ]
