"""Reads prepared datasets, and writes them: rows, dropped rows and card appear together or not at all."""

import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dapo_mega.atomic_files import errors_naming
from dapo_mega.data.numbers import plain
from dapo_mega.errors import InputError
from dapo_mega.preparation.card import CARD, DATA, Card, SourceRecord, card_of, file_record, read_card, verified_card
from dapo_mega.preparation.columns import ColumnType, plain_value
from dapo_mega.preparation.folders import complete_folder, refuse_foreign

DroppedFormat = Literal["parquet", "jsonl"]
"""The file format of dropped rows."""

_GROUP_ROWS = 10_000
_DROPPED_TYPES = ColumnType("record", fields={n: ColumnType("text") for n in ("reason", "evidence", "where", "row")})


@contextlib.contextmanager
def new_dataset(
    folder: Path, dropped: DroppedFormat | None = None, *, force: bool = False
) -> "Iterator[DatasetWriter]":
    """A writer of a prepared dataset, which appears at `folder` when the block ends and `finish` was called.

    `dropped`: also write dropped rows, as `dropped.parquet` or `dropped.jsonl` in the folder. Raises `InputError` if
    the folder holds anything but a prepared dataset, or that without `force`.
    """
    check_folder(folder, force=force)
    with complete_folder(folder) as (content, temporary), errors_naming(folder):
        with contextlib.closing(DatasetWriter(content, temporary, dropped)) as writer:
            yield writer
        assert writer.is_finished, "finish() was not called"


def check_folder(folder: Path, *, force: bool) -> None:
    """Raises `InputError` for a folder that `new_dataset` would not write."""
    is_ours = folder.is_dir() and card_of(folder) is not None
    refuse_foreign(folder, is_ours=is_ours)
    if is_ours and not force:
        raise InputError(f"{folder} holds a prepared dataset already; use --force to replace it, or another folder")


def read_dataset(folder: Path) -> tuple[Card, Iterator[dict[str, Any]]]:
    """The card of a prepared dataset and its rows in order, read in batches, as plain values.

    Raises `InputError` if there is no card, or if the rows are not those that it was written for.
    """
    if verified_card(folder) is None:
        raise InputError(f"{folder} holds no {CARD}; give a folder that `dapo-mega prepare dataset` wrote")
    return read_card(folder / CARD), _rows(folder / DATA)


class DatasetWriter:
    """Takes rows one after the other. `finish` writes the files; the rows wait on disk until then, because their
    columns' types are known only at the end."""

    def __init__(self, content: Path, temporary: Path, dropped: DroppedFormat | None) -> None:
        self.rows = RowSpool(temporary / "rows.jsonl")
        self._originals = RowSpool(temporary / "originals.jsonl")
        self.temporary = temporary
        self.is_finished = False
        self._content = content
        self._counts: Counter[str] = Counter()
        self._dropped = RowSpool(temporary / "dropped.jsonl")
        self._dropped_format = dropped

    def close(self) -> None:
        for spool in (self.rows, self._originals, self._dropped):
            spool.close()

    def keep(self, values: Mapping[str, Any], where: str = "a row", original: Mapping[str, Any] | None = None) -> None:
        """Add a row. `where` names it in errors; `original` is the row of its source, in case it is dropped later."""
        self.rows.append(plain_value(values, where))
        if self._dropped_format and original is not None:
            self._originals.append(_json_value(plain(original)))

    def drop_kept(self, reason: str, evidence: str, where: str, number: int) -> None:
        """`drop` for a row that was kept with its original; `finish` must be told to leave it out."""
        self.drop(reason, evidence, where, self._originals[number] if self._dropped_format else {})

    def drop(self, reason: str, evidence: str, where: str, values: Mapping[str, Any]) -> None:
        """Count a row that is left out, and write it where dropped rows are asked for.

        `reason` is one of few words that are counted; `evidence` says what was found in this row; `where` is its file
        and row. The row itself is JSON text in parquet, and JSON in JSONL.
        """
        self._counts[reason] += 1
        if self._dropped_format:
            row = _json_value(plain(values))
            text = json.dumps(row) if self._dropped_format == "parquet" else row
            self._dropped.append({"reason": reason, "evidence": evidence, "where": where, "row": text})

    def finish(
        self,
        made_by: str,
        *,
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
        sources: Iterable[SourceRecord] = (),
        details: Mapping[str, Any] | None = None,
        parent: Card | None = None,
        without: Collection[int] = (),
    ) -> Card:
        """Write rows and card. Raises `InputError` if no row is left.

        `without`: the indices of rows that were added by `keep` and are left out after all; count them by `drop`.
        """
        num_rows = len(self.rows) - len(without)
        if not num_rows:
            counts = ", ".join(f"{n} {reason}" for reason, n in sorted(self._counts.items()))
            raise InputError(f"no row is left; dropped: {counts or 'none, the sources are empty'}")
        _write_parquet(
            self._content / DATA, self.rows.types, (row for i, row in enumerate(self.rows) if i not in without)
        )
        if self._dropped_format == "parquet":
            _write_parquet(self._content / "dropped.parquet", _DROPPED_TYPES, self._dropped)
        elif self._dropped_format:
            with (self._content / "dropped.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in self._dropped)
        mixed = self.rows.types.mixed()
        card = Card(
            made_by=made_by,
            data=file_record(self._content / DATA),
            num_rows_read=num_rows + self._counts.total(),
            num_rows=num_rows,
            dropped=dict(sorted(self._counts.items())),
            sources=tuple(sources),
            settings=settings,
            versions=versions,
            details={**(details or {}), **({"columns_of_mixed_types": mixed} if mixed else {})},
            parent=parent,
        )
        (self._content / CARD).write_text(card.text(), encoding="utf-8")
        self.is_finished = True
        return card


def _write_parquet(path: Path, types: ColumnType, rows: Iterable[Mapping[str, Any]]) -> None:
    """Row groups are of one size, which together with the types decides the file's bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({name: column.arrow() for name, column in types.fields.items()})
    remaining = iter(rows)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := [types.fit(row) for row in islice(remaining, _GROUP_ROWS)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_GROUP_ROWS, use_threads=False):
            yield from batch.to_pylist()


def _json_value(value: Any) -> Any:
    """The value as strict JSON holds it: what is neither number, text, list nor record becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


class RowSpool:
    """Rows in a file, in the order in which they were added. Memory: 8 bytes per row."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._ends = array("Q", [0])
        self.types = ColumnType("record")

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, values: Mapping[str, Any]) -> None:
        """Add a row of plain values (`plain_value`)."""
        self.types.see(values)
        line = json.dumps(values).encode()
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row; the file's end is where rows are added again afterwards."""
        start, end = self._ends[index], self._ends[index + 1]
        self._file.seek(start)
        line = self._file.read(end - start)
        self._file.seek(0, 2)
        row: dict[str, Any] = json.loads(line)
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows; no row may be added or read by its index meanwhile."""
        self._file.seek(0)
        for index in range(len(self)):
            yield json.loads(self._file.read(self._ends[index + 1] - self._ends[index]))
