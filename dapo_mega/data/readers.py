"""Reads the rows of a dataset one at a time, each with its source and row or line number.

Files are read with pyarrow and json rather than through `datasets.load_dataset`: nothing is copied into a cache (so
any number of ranks may read the same file at once, from a read-only folder, too), numbers in JSON keep the digits
they were written with instead of a guessed column type, rows may differ in their fields, and an error can name the
line. `datasets` reads what only it can: its own `save_to_disk` folders and names on the Hugging Face hub.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_mega.config import SourceConfig
from dapo_mega.config.base import flat
from dapo_mega.config.paths import DATASET_SUFFIXES, is_hub_name
from dapo_mega.data.json_lists import RepeatedFieldError, list_items
from dapo_mega.data.numbers import NumberText, arrow_records, plain
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_BATCH_ROWS = 1024
_MAX_CELL_CHARACTERS = 2**24
_MAX_LINE_CHARACTERS = 2**24
_MAX_WHOLE_BYTES = 2**31
_NO_UTF8 = "surrogateescape"
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "demonstrations")


@dataclass(frozen=True)
class Row:
    """One record. `number` counts the rows of `source` from 0, or its lines from 1 where `unit` is "line".
    `broken` says why it cannot be read, where it cannot; `values` then hold its text."""

    source: str
    number: int
    values: Mapping[str, Any]
    unit: str = "row"
    broken: str = ""

    @property
    def where(self) -> str:
        return f"{self.source}, {self.unit} {self.number}"

    def value(self, column: str, option: str) -> Any:
        """The field of a dotted name, None where it or a record around it is null. Raises `InputError` naming the
        fields there are, and the `option` to correct."""
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for part in column.split("."):
            if value is None:
                break
            if not isinstance(value, Mapping) or part not in value:
                raise InputError(_absent(column, option, self.where, list(flat(self.values))))
            value = value[part]
        return value

    def text(self, text: str) -> str:
        """The text as it is; `InputError` where it holds half of a surrogate pair, which no file or tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{self.where} holds half of a surrogate pair ({text[error.start]!r}), which is no character; correct "
                f"or remove the row"
            ) from error
        return text

    def has(self, column: str) -> bool:
        """Whether there is a field of this dotted name, if only a null."""
        try:
            self.value(column, "")
        except InputError:
            return False
        return True

    def optional(self, column: str) -> Any:
        """The field of a dotted name, None where the row lacks it."""
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def without(self, *columns: str) -> dict[str, Any]:
        """A copy of the fields without those of these dotted names; numbers of JSON files become numbers."""
        rest: dict[str, Any] = plain(self.values)
        for column in columns:
            inner, name = rest, column
            while name not in inner and "." in name:
                part, _, name = name.partition(".")
                inner = inner.get(part, {})
            inner.pop(name, None)
        return rest


def read_rows(config: SourceConfig, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows that `config` names, in order, at most `config.max_rows` of them (counted before deduplication).

    `columns` (dotted names) lets columnar files skip the other columns; None reads all. Numbers in JSON files are
    returned as the text they were written as. Raises `InputError` for what does not exist or cannot be read.
    """
    return islice(_all_rows(config, columns), config.max_rows)


def dataset_files(config: SourceConfig) -> list[Path]:
    """The files of a local file or folder of files, sorted by path.

    A folder whose file names begin with split names (train-00000.parquet, test.jsonl) gives those of `config.split`.
    """
    path = Path(config.path)
    if path.is_file():
        if path.suffix not in DATASET_SUFFIXES:
            raise InputError(
                f"{path} ends in {path.suffix!r}; a dataset file ends in one of {', '.join(DATASET_SUFFIXES)}"
            )
        return [path]
    files = sorted(
        f for f in path.rglob("*") if f.suffix in DATASET_SUFFIXES and not f.name.startswith((".", "dataset_info"))
    )
    if not files:
        raise InputError(f"folder {path} holds no dataset file; one ends in {', '.join(DATASET_SUFFIXES)}")
    splits = {file: re.split(r"[-_.]", file.name)[0] for file in files}
    chosen = [file for file in files if splits[file] == config.split]
    others = sorted(set(splits.values()).intersection(_SPLITS))
    if not chosen and others:
        found = ", ".join(others)
        raise InputError(f"folder {path} has no file of split {config.split!r}, only {found}; set split to one of them")
    return chosen or files


def _all_rows(config: SourceConfig, columns: Sequence[str] | None) -> Iterator[Row]:
    path = Path(config.path)
    if is_saved_dataset(path):
        yield from _dataset_rows(_saved_dataset(path, config.split), config.path, columns)
    elif path.exists():
        for file in dataset_files(config):
            yield from file_rows(file, config.split, columns)
    elif is_hub_name(config.path):
        yield from _dataset_rows(_hub_dataset(config.path, config.split), config.path, columns)
    else:
        siblings = [f.name for f in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give the path of a file or folder, or a hub name"
        raise InputError(f"dataset {path} does not exist; {hint}")


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def file_rows(
    path: Path, split: str, columns: Sequence[str] | None = None, *, keep_broken: bool = False
) -> Iterator[Row]:
    """The rows of one file; see `read_rows` for the arguments. Raises `InputError` for what cannot be read. With
    `keep_broken` a row that cannot is one with `broken`, and `InputError` says that the file's rest cannot be read."""
    try:
        for row in _rows_by_format(path, split, columns):
            if row.broken and not keep_broken:
                raise InputError(row.broken)
            yield row
    except _unreadable() as error:
        raise InputError(_no_file(path, error)) from error


def _rows_by_format(path: Path, split: str, columns: Sequence[str] | None) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return _parquet_rows(path, columns)
    if path.suffix == ".arrow":
        return _arrow_rows(_ipc_batches(path), str(path))
    if path.suffix == ".jsonl":
        return _json_lines(path)
    return _csv_rows(path) if path.suffix == ".csv" else _json_rows(path, split)


def _unreadable() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (OSError, pa.ArrowException, UnicodeDecodeError, csv.Error, RecursionError, OverflowError)


def _no_file(path: Path, error: Exception) -> str:
    reason = str(error).split("\n")[0]
    return f"{path} cannot be read as {path.suffix[1:]} ({reason}); check or re-create the file"


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    """By row groups, so that a broken one costs its own rows only."""
    import pyarrow.parquet as pq

    number = end = 0
    with pq.ParquetFile(path) as file:
        wanted = _top_level(columns, file.schema_arrow.names, str(path))
        for group in range(file.num_row_groups):
            end += file.metadata.row_group(group).num_rows
            try:
                # One thread: each rank reads, and they share the machine's cores.
                batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=wanted, use_threads=False)
                for row in _arrow_rows(batches, str(path), number):
                    number += 1
                    yield row
            except _unreadable() as error:
                for lost in range(number, end):
                    yield Row(str(path), lost, {}, broken=_no_file(path, error))
            number = end


def _ipc_batches(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            yield from (file.get_batch(i) for i in range(file.num_record_batches))
        else:  # The streaming format, which `datasets` writes.
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def _arrow_rows(batches: Iterator[pa.RecordBatch], source: str, number: int = 0) -> Iterator[Row]:
    for batch in batches:
        _refuse_repeated(batch.schema.names, source)
        for field in batch.schema:
            _refuse_repeated_fields(field, source)
        for values in arrow_records(batch):
            yield Row(source, number, values)
            number += 1


def _refuse_repeated(names: Sequence[str], path: Path | str) -> None:
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{path} has several columns {repeated[0]!r}; rename all but one of them")


def _refuse_repeated_fields(field: pa.Field, path: Path | str) -> None:
    """Of a column with fields, or of a list of such records."""
    import pyarrow as pa

    children = [field.type.field(i) for i in range(field.type.num_fields)]
    if pa.types.is_struct(field.type):
        _refuse_repeated([f"{field.name}.{child.name}" for child in children], path)
    for child in children:
        _refuse_repeated_fields(child, path)


def _csv_rows(path: Path) -> Iterator[Row]:
    """Rows of text under the names of the first line; a cell may span lines if it is quoted."""
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    with path.open(encoding="utf-8-sig", errors=_NO_UTF8, newline="") as lines:
        records = _csv_records(lines)
        _, names, reason = next(records, (1, [], ""))
        if reason or any(map(_no_utf8, names)):
            raise InputError(f"{path}, line 1 {reason or 'is not utf-8'}; check or re-create the file")
        _refuse_repeated(names, path)
        for line, cells, reason in records:
            if not reason and len(cells) != len(names):
                reason = (
                    f"has {len(cells)} cells under {len(names)} columns; correct the line: text with a comma or a line "
                    f"break needs double quotes"
                )
            elif not reason and (text := next(filter(_no_utf8, cells), None)):
                reason = f"is not utf-8 ({_NOT_UTF8.sub('?', text):.80}); correct the line"
            if reason:
                yield Row(str(path), line, {"text": cells}, "line", f"{path}, line {line} {reason}")
            else:
                yield Row(str(path), line, dict(zip(names, cells, strict=True)), "line")


def _csv_records(lines: Iterable[str]) -> Iterator[tuple[int, list[str], str]]:
    """The last line of each record that is not empty, its cells, and what is wrong with it.

    A record with an open quote runs into the lines behind it. Where each of them is a record by itself, they are read
    as such, and only the first line is broken.
    """
    taken: list[str] = []

    def kept() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    reader, num_columns = csv.reader(kept(), strict=True), 0
    while True:
        taken.clear()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            reason = f"is not valid CSV ({error}); correct the line"
            behind = [_single_record(line) for line in taken[1:]]
            is_one = len({len(found) for found in behind} | {num_columns}) != 1
            first = reader.line_num - (0 if is_one else len(behind))
            yield first, taken[:] if is_one else taken[:1], reason
            yield from () if is_one else ((first + i, found, "") for i, found in enumerate(behind, start=1))
            continue
        if cells is None:
            return
        num_columns = num_columns or len(cells)
        if cells:
            yield reader.line_num, cells, ""


def _single_record(line: str) -> list[str]:
    """The cells of a line that is a record by itself, else none."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _no_utf8(text: str) -> bool:
    """Whether a text that was read with `_NO_UTF8` has bytes that are no UTF-8."""
    return not text.isascii() and _NOT_UTF8.search(text) is not None


def _json_rows(path: Path, split: str) -> Iterator[Row]:
    """A list of records, which is read piece by piece; the same under a key of an object, which is read as a whole; or
    (as many files in use are) one record per line."""
    with path.open(encoding="utf-8-sig", errors=_NO_UTF8) as file:
        is_list = file.read(1024).lstrip().startswith("[")
    if is_list:
        with path.open(encoding="utf-8-sig") as file:
            for number, values in enumerate(list_items(file, str(path), _decoder())):
                yield _record(Row(str(path), number, values))
        return
    if _is_one_record_per_line(path):
        yield from _json_lines(path)
        return
    if (size := path.stat().st_size) > _MAX_WHOLE_BYTES:
        raise InputError(
            f"{path} is one JSON object of {size / 2**30:.1f} GiB, which is read as a whole, and at most "
            f"{_MAX_WHOLE_BYTES / 2**30:g} GiB are; write its lists to files of their own, or as JSONL or parquet"
        )
    try:
        content = _parse_json(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno} is not valid JSON ({error.msg}); correct the file") from error
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds a JSON {type(content).__name__}; expected a list of records")
    lists = {k: v for k, v in content.items() if isinstance(v, list) and all(isinstance(item, Mapping) for item in v)}
    if split not in lists and len(lists) != 1:
        found = ", ".join(map(repr, lists)) or "none"
        raise InputError(f"{path} is one JSON object; its lists of records are {found}; set split to one of them")
    records = lists[split] if split in lists else next(iter(lists.values()))
    for number, values in enumerate(records):
        yield _record(Row(str(path), number, values))


def _is_one_record_per_line(path: Path) -> bool:
    """Whether the first line that is not empty is a whole record, and another follows."""
    with path.open(encoding="utf-8-sig", errors=_NO_UTF8) as lines:
        filled = (line for line in iter(lambda: lines.readline(_MAX_LINE_CHARACTERS), "") if line.strip())
        first, second = next(filled, ""), next(filled, "")
        try:
            return second.lstrip().startswith("{") and isinstance(_parse_json(first), Mapping)
        except json.JSONDecodeError:
            return False


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors=_NO_UTF8) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            reason = "is not utf-8"
            if not _no_utf8(line):
                try:
                    yield _record(Row(str(path), number, _parse_json(line), "line"))
                    continue
                except (json.JSONDecodeError, RecursionError) as error:
                    reason = f"is not valid JSON ({str(error).partition(': line ')[0]})"
            text = _NOT_UTF8.sub("?", line.strip())
            yield Row(str(path), number, {"text": text}, "line", f"{path}, line {number} {reason}; correct the line")


def _parse_json(text: str) -> Any:
    return _decoder().decode(text)


@cache
def _decoder() -> json.JSONDecoder:
    # Numbers as text: a ground truth of 27.0, 1e400 or 0.10 must come out as it went in.
    return json.JSONDecoder(
        parse_float=NumberText, parse_int=NumberText, parse_constant=NumberText, object_pairs_hook=_unrepeated
    )


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RepeatedFieldError(f"field {name!r} stands twice in one record", "", 0)
    return values


def _record(row: Row) -> Row:
    value: Any = row.values
    if isinstance(value, Mapping):
        return row
    if isinstance(value, InputError):
        value, broken = "", str(value)
    elif isinstance(value, RepeatedFieldError):
        value, broken = "", f"{row.where} is not valid JSON ({value.msg}); correct the file"
    else:
        broken = f"{row.where} is a JSON {type(plain(value)).__name__}; expected a record with named fields"
    return Row(row.source, row.number, {"text": value}, row.unit, broken)


def _saved_dataset(path: Path, split: str) -> datasets.Dataset:
    """A folder written by `save_to_disk`, of one dataset or of several splits."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise InputError(f"{path} has no split {split!r}; set split to one of {', '.join(map(str, loaded))}")
        return loaded[split]
    return loaded


def _hub_dataset(name: str, split: str) -> datasets.Dataset:
    """Of a name with `:configuration`, that one."""
    import datasets

    dataset, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(dataset, configuration or None, split=split)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{name} is no local file or folder, and its split {split!r} could not be loaded from the Hugging Face hub "
            f"({reason}); download it where there is a network and give the path of the files"
        ) from error


def _dataset_rows(dataset: datasets.Dataset, source: str, columns: Sequence[str] | None) -> Iterator[Row]:
    wanted = _top_level(columns, dataset.column_names, source)
    selected = dataset if wanted is None else dataset.select_columns(wanted)
    tables = selected.with_format("arrow").iter(_BATCH_ROWS)
    yield from _arrow_rows((batch for table in tables for batch in table.to_batches()), source)


def _top_level(columns: Sequence[str] | None, names: Sequence[str], source: str) -> list[str] | None:
    """The stored columns that hold the dotted `columns`."""
    if columns is None:
        return None
    wanted = dict.fromkeys(c if c in names else c.partition(".")[0] for c in columns)
    missing = [column for column in wanted if column not in names]
    if missing:
        raise InputError(_absent(missing[0], "columns", source, names))
    return list(wanted)


def _absent(column: str, option: str, where: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(column, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"set {option} to one of them"
    return f"{where} has no column {column!r}; it has {', '.join(names)}; {hint}"
