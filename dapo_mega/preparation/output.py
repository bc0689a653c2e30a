"""Reads prepared datasets, and writes them: rows, dropped rows and card appear together or not at all."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from dapo_mega.atomic_files import errors_naming
from dapo_mega.data.numbers import plain
from dapo_mega.errors import InputError
from dapo_mega.preparation.card import CARD, DATA, Card, SourceRecord, card_of, file_record, read_card, verified_card
from dapo_mega.preparation.columns import ColumnType, plain_value
from dapo_mega.preparation.folders import complete_folder
from dapo_mega.preparation.spool import RowSpool

if TYPE_CHECKING:
    import pyarrow as pa

DroppedFormat = Literal["parquet", "jsonl"]
"""The file format of dropped rows."""

_GROUP_ROWS = 10_000


@contextlib.contextmanager
def new_dataset(folder: Path, dropped: DroppedFormat | None = None, *, force: bool = False) -> Iterator[DatasetWriter]:
    """A writer of a prepared dataset, which appears at `folder` when the block ends and `finish` was called.

    `dropped`: also write dropped rows, as `dropped.parquet` or `dropped.jsonl` in the folder. Raises `InputError` if
    the folder holds anything but a prepared dataset, or that without `force`.
    """
    check_folder(folder, force=force)
    with complete_folder(folder) as (content, temporary), errors_naming(folder):
        with DatasetWriter(content, temporary, dropped) as writer:
            yield writer
        assert writer.is_finished, "finish() was not called"


def check_folder(folder: Path, *, force: bool) -> None:
    """Raises `InputError` for a folder that `new_dataset` would not write."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder to write to")
    if any(folder.iterdir()) and card_of(folder) is None:
        raise InputError(f"{folder} holds files that this command did not write; give another folder or empty it")
    if card_of(folder) and not force:
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
        self._dropped = _DroppedRows(content, dropped) if dropped else None

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rows.__exit__(kind, error, trace)
        self._originals.__exit__(kind, error, trace)
        if self._dropped:
            self._dropped.close()

    def keep(self, values: Mapping[str, Any], where: str = "a row", original: Mapping[str, Any] | None = None) -> None:
        """Add a row. `where` names it in errors; `original` is the row of its source, in case it is dropped later."""
        self.rows.append(plain_value(values, where))
        if self._dropped and original is not None:
            self._originals.append(_json_value(plain(original)))

    def drop_kept(self, reason: str, evidence: str, where: str, number: int) -> None:
        """`drop` for a row that was kept with its original; `finish` must be told to leave it out."""
        self.drop(reason, evidence, where, self._originals[number] if self._dropped else {})

    def drop(self, reason: str, evidence: str, where: str, values: Mapping[str, Any]) -> None:
        """Count a row that is left out, and write it where dropped rows are asked for.

        `reason` is one of few words that are counted; `evidence` says what was found in this row; `where` is its file
        and row.
        """
        self._counts[reason] += 1
        if self._dropped:
            self._dropped.add(reason, evidence, where, values)

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
        if self._dropped:
            self._dropped.close()
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


class _DroppedRows:
    """Dropped rows with reason, evidence and place; the row itself is JSON text in parquet, and JSON in JSONL."""

    def __init__(self, content: Path, kind: DroppedFormat) -> None:
        self._types = ColumnType("record")
        for name in ("reason", "evidence", "where", "row"):
            self._types.see({name: ""})
        self._lines = (content / "dropped.jsonl").open("w", encoding="utf-8") if kind == "jsonl" else None
        self._parquet = None if self._lines else _ParquetRows(content / "dropped.parquet", self._types)

    def add(self, reason: str, evidence: str, where: str, values: Mapping[str, Any]) -> None:
        row = _json_value(plain(values))
        if self._lines:
            line = {"reason": reason, "evidence": evidence, "where": where, "row": row}
            self._lines.write(json.dumps(line) + "\n")
        elif self._parquet:
            self._parquet.add({"reason": reason, "evidence": evidence, "where": where, "row": json.dumps(row)})

    def close(self) -> None:
        if self._lines:
            self._lines.close()
        elif self._parquet:
            self._parquet.close()


class _ParquetRows:
    """A parquet file with row groups of one size, which together with the types decides its bytes."""

    def __init__(self, path: Path, types: ColumnType) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._types = types
        self._schema = pa.schema({name: column.arrow() for name, column in types.fields.items()})
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._waiting: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        self._waiting.append(self._types.fit(row))
        if len(self._waiting) == _GROUP_ROWS:
            self._write()

    def close(self) -> None:
        if self._writer.is_open:
            if self._waiting:
                self._write()
            self._writer.close()

    def _write(self) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=self._schema))
        self._waiting = []


def _write_parquet(path: Path, types: ColumnType, rows: Iterable[Mapping[str, Any]]) -> None:
    file = _ParquetRows(path, types)
    for row in rows:
        file.add(row)
    file.close()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    batches: Iterable[pa.RecordBatch]
    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(_GROUP_ROWS, use_threads=False)
        for batch in batches:
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
