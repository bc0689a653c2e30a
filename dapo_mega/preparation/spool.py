"""Rows on their way: a temporary file of JSON lines that can be read again, and the types of their columns."""

import json
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_mega.preparation.columns import ColumnType


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
