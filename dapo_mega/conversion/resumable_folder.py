"""Writes folders file by file from one or several processes, resumes after a crash, and renames complete folders.

Files are written into `.NAME.partial/content` beside the target. Each file on disk gets a record in `records`. When all
files exist, the content is renamed to the target. The target keeps `conversion.json`: its source and the sizes of its
files. A lock on `.NAME.lock` excludes other writers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dapo_mega.atomic_files import errors_naming, read_json_object, replace_file
from dapo_mega.distributed.commands import Commanded, command
from dapo_mega.errors import InputError

logger = logging.getLogger(__name__)

RECORD_FILE = "conversion.json"
_CONTENT = "content"
_RECORDS = "records"

Advance = Callable[[int], None]


@dataclass(frozen=True)
class OutputFile:
    """One file of the folder. `write` fills the path it is given, reports bytes as they are written, and returns a
    JSON value for `finish`."""

    name: str
    nbytes: int
    write: Callable[[Path, Advance], Any]


@dataclass(frozen=True)
class OutputFolder:
    """The folder to write: a JSON description of its source, its large files, and a function that completes it from the
    folder and the files' records."""

    made_from: Mapping[str, Any]
    files: Sequence[OutputFile]
    finish: Callable[[Path, Mapping[str, Any]], None]


def write_folder(target: Path, output: OutputFolder) -> bool:
    """On all processes: rank 0 writes the folder, and the others their share of its files. Returns, on rank 0, whether
    anything was written: False if `target` is the finished result already.

    Raises InputError for any other existing target, and if another command is writing it.
    """
    if not target.name:
        raise InputError(f"{target} cannot be written; give a folder that does not exist yet")
    writers = _Writers(output.files)
    if _rank() != 0:
        writers.obey()
        return True
    # Convert through JSON, so that the value equals the one read back.
    made_from = json.loads(json.dumps(output.made_from))
    partial = target.with_name(f".{target.name}.partial")
    with writers.commanding():
        if target.is_symlink() and not target.exists():
            raise InputError(
                f"{target} is a link to a folder that does not exist; give another folder, or remove the link"
            )
        with _locked(target):
            if _is_finished(target, made_from):
                if _json_object(partial / RECORD_FILE) == made_from:
                    _discard(partial)
                return False
            _prepare(partial, made_from)
            writers.write(partial)
            content = partial / _CONTENT
            output.finish(content, {file.name: _read_record(partial, file.name)["value"] for file in output.files})
            sizes = {file.name: file.stat().st_size for file in content.iterdir()}
            replace_file(content / RECORD_FILE, json.dumps({"made_from": made_from, "files": sizes}, indent=1))
            content.rename(target)
            _discard(partial)
    return True


class _Writers(Commanded):
    def __init__(self, files: Sequence[OutputFile]) -> None:
        super().__init__(dist.group.WORLD if dist.is_initialized() else None)
        self._files = files

    @command
    def write(self, partial: Path) -> None:
        """Write this process's share of the missing files. The first process shows a progress bar if its standard error
        is a terminal."""
        size = dist.get_world_size() if dist.is_initialized() else 1
        mine = self._files[_rank() :: size]
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=_rank() != 0 or not sys.stderr.isatty(),
        ) as bar:
            task = bar.add_task("writing", total=sum(file.nbytes for file in mine))
            for file in mine:
                record, final = _read_record(partial, file.name), partial / _CONTENT / file.name
                if "value" in record and _size(final) == record.get("size"):
                    bar.advance(task, file.nbytes)
                    continue
                temporary = partial / f"{file.name}.tmp"
                value = file.write(temporary, lambda nbytes: bar.advance(task, nbytes))
                with errors_naming(temporary), temporary.open("rb") as written:
                    os.fsync(written.fileno())
                record = {"size": temporary.stat().st_size, "value": value}
                temporary.rename(final)
                replace_file(partial / _RECORDS / f"{file.name}.json", json.dumps(record))


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the target's lock. Raises InputError while another process holds it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{target} is being written by another command; wait until it ends, or give another folder"
            ) from None
        except OSError as error:
            # Some network file systems have no locks.
            logger.warning("%s cannot be locked (%s); start no other conversion to %s", lock, error.strerror, target)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def fingerprint(folder: Path, further: Iterable[str] = ()) -> dict[str, list[int]]:
    """Sizes in bytes and modification times in ns of a checkpoint's files: those in the folder, and `further` files in
    sub-folders. Links are followed."""
    names = {file.name for file in folder.iterdir() if file.is_file()} | set(further)
    status = {name: (folder / name).stat() for name in sorted(names)}
    return {name: [found.st_size, found.st_mtime_ns] for name, found in status.items()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_finished(target: Path, made_from: Mapping[str, Any]) -> bool:
    if not target.exists():
        return False
    record = _json_object(target / RECORD_FILE)
    sizes = record.get("files")
    if "made_from" not in record or not isinstance(sizes, dict):
        raise InputError(f"{target} exists already; give another folder, or remove it")
    same = record["made_from"] == made_from
    whole = all(_size(target / str(name)) == size for name, size in sizes.items())
    if not (same and whole):
        reason = "made from another source or with other options" if whole else "damaged"
        raise InputError(f"{target} exists already and was {reason}; give another folder, or remove it")
    return True


def _json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file that this module wrote; empty for any other content."""
    try:
        return read_json_object(file)
    except InputError:
        return {}


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except (OSError, ValueError):
        return None


def _prepare(partial: Path, made_from: Mapping[str, Any]) -> None:
    """Continue a partial folder of the same conversion, replace one of another conversion, refuse any other folder."""
    begun_from = _json_object(partial / RECORD_FILE)
    if begun_from == made_from:
        logger.info("continuing the interrupted conversion in %s", partial)
    elif partial.exists():
        _check_ours(partial, has_record=bool(begun_from))
        logger.warning("replacing %s, which was begun from another source or with other options", partial)
        _discard(partial)
    for folder in (_RECORDS, _CONTENT):
        (partial / folder).mkdir(parents=True, exist_ok=True)
    replace_file(partial / RECORD_FILE, json.dumps(made_from))


def _discard(partial: Path) -> None:
    """Remove the partial folder, last the record that identifies it."""
    for folder in (_RECORDS, _CONTENT):
        shutil.rmtree(partial / folder, ignore_errors=True)
    shutil.rmtree(partial)


def _check_ours(partial: Path, has_record: bool) -> None:
    """Raises InputError for a folder with files that no conversion wrote; a folder without a record must be empty."""
    strangers = {
        path.name for path in partial.iterdir() if path.name not in (_RECORDS, _CONTENT) and path.suffix != ".tmp"
    } - {RECORD_FILE if has_record else ""}
    if not has_record:
        strangers |= {path.name for folder in (_RECORDS, _CONTENT) for path in (partial / folder).glob("*")}
    if strangers:
        raise InputError(
            f"{partial} holds {min(strangers)}, which no conversion wrote; move the folder away and start again"
        )


def _read_record(partial: Path, name: str) -> dict[str, Any]:
    return _json_object(partial / _RECORDS / f"{name}.json")
