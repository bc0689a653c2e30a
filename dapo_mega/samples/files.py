"""The files of a run's samples: their names, atomic writing, and the removal of old ones.

`step_00000012.parquet` holds the groups of step 12, `evaluation_00000010.parquet` the responses of the evaluation after
step 10. A file gets its name when all of it is on disk.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_mega.atomic_files import errors_naming, make_way
from dapo_mega.samples.rows import Kind

_NAME = re.compile(r"(step|evaluation)_(\d{8,})\.parquet")
_PREFIX: dict[Kind, str] = {"training": "step", "evaluation": "evaluation"}
_FLOAT_COLUMNS = ["engine_logprobs", "trainer_logprobs", "update_logprobs"]


@dataclass(frozen=True, order=True)
class StoredFile:
    """One file. Files sort by step, an evaluation after its step."""

    step: int
    is_evaluation: bool
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size


def samples_folder(output_dir: str | Path) -> Path:
    """Where a run's samples are."""
    return Path(output_dir) / "samples"


def stored_files(folder: Path) -> list[StoredFile]:
    """The complete files, in the order of steps."""
    found = []
    for path in folder.glob("*.parquet"):
        if match := _NAME.fullmatch(path.name):
            found.append(StoredFile(int(match[2]), match[1] == "evaluation", path))
    return sorted(found)


def file_of(folder: Path, kind: Kind, step: int) -> Path:
    return folder / f"{_PREFIX[kind]}_{step:08d}.parquet"


def write_table(path: Path, table: pa.Table) -> None:
    """Write the table so that `path` is absent or complete at any moment. Leaves nothing behind if that fails."""
    write_tables(path, table.schema, [table])


def write_tables(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """`write_table` of tables that follow one another, of which one at a time is in memory."""
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    dictionary = [name for name in schema.names if name not in _FLOAT_COLUMNS]
    try:
        with errors_naming(path), temporary.open("wb") as file:
            with pq.ParquetWriter(
                file,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=dictionary,
                write_statistics=False,
                write_page_checksum=True,
            ) as writer:
                for table in tables:
                    writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def rotate(folder: Path, max_bytes: int) -> list[Path]:
    """Remove the oldest steps, then the oldest evaluations, until the files take at most `max_bytes`; the newest of
    each kind stays. Returns what was removed."""
    files = stored_files(folder)
    total = sum(file.size for file in files)
    removed = []
    steps, evaluations = ([file for file in files if file.is_evaluation == chosen][:-1] for chosen in (False, True))
    for file in steps + evaluations:
        if total <= max_bytes:
            break
        total -= file.size
        file.path.unlink()
        removed.append(file.path)
    return removed


def discard_after(folder: Path, step: int) -> int:
    """Remove the files of steps after `step`, which will be done again, and those that a kill cut off; returns how
    many steps' and evaluations' files went."""
    make_way(folder, for_folder=True)
    for path in folder.glob("*.parquet.tmp"):
        path.unlink()
    for path in folder.glob("*.parquet"):
        make_way(path)
    late = [file for file in stored_files(folder) if file.step > step]
    for file in late:
        file.path.unlink()
    return len(late)
