"""Writes folders that appear complete or not at all."""

import contextlib
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_mega.atomic_files import read_json_object
from dapo_mega.errors import InputError

RECORD = "preparation.json"
"""Kept in every prepared folder: the parameters it was made from and the files it held."""
_LOCK = "lock"
_REPLACED = "old"


def prepare_folder(
    folder: Path, parameters: Mapping[str, Any], write: Callable[[Path], None], force: bool = False
) -> bool:
    """Have `write` fill a new folder that appears at `folder` only when complete; returns whether it was written.

    A folder made earlier from the same `parameters` is left as it is (False). Raises `InputError` for one made from
    others or with files missing, unless `force`, and for a non-empty folder that was not prepared, always.
    """
    if not _must_write(folder, parameters, force):
        return False
    with complete_folder(folder) as (content, _):
        write(content)
        files = sorted(str(file.relative_to(content)) for file in content.rglob("*") if file.is_file())
        record = {"parameters": parameters, "files": files}
        (content / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return True


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A new folder to fill, and one for temporary files; the first replaces `folder` when the block ends without an
    exception. Both are on the file system of `folder`, and are gone afterwards; what a killed process left is removed
    by the next one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with (staging / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content, temporary = staging / "new", staging / "temporary"
            content.mkdir()
            temporary.mkdir()
            yield content, temporary
            replaced = staging / _REPLACED
            if folder.exists():
                os.replace(folder, replaced)
            try:
                os.replace(content, folder)
            except OSError:
                if replaced.exists():
                    os.replace(replaced, folder)
                raise
    finally:
        shutil.rmtree(staging)


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes left that were killed while they made `folder`; a process that lives holds the lock."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*/{_LOCK}"):
        if not folder.exists() and (path.parent / _REPLACED).exists():
            continue  # Killed between two renames: the only copy is in there.
        with contextlib.suppress(OSError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent)


def refuse_foreign(folder: Path, *, is_ours: bool) -> None:
    """Raise `InputError` for a file, and for a folder that holds files unless `is_ours` says that they are ours."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder to write to")
    if folder.exists() and not is_ours and any(folder.iterdir()):
        raise InputError(f"{folder} holds files that this command did not write; give another folder or empty it")


def _must_write(folder: Path, parameters: Mapping[str, Any], force: bool) -> bool:
    record_path = folder / RECORD
    refuse_foreign(folder, is_ours=record_path.is_file())
    if force or not record_path.is_file():
        return True
    record = read_json_object(record_path, f"use --force to write {folder} again")
    made_from, files = record.get("parameters"), record.get("files")
    if not (isinstance(made_from, dict) and isinstance(files, list)):
        raise InputError(f"{record_path} is damaged; use --force to write {folder} again")
    missing = [file for file in files if not (folder / str(file)).is_file()]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(map(str, missing))}; use --force to write it again")
    if made_from != parameters:
        different = ", ".join(
            f"{key}={made_from.get(key)!r} (now {parameters.get(key)!r})"
            for key in sorted({*made_from, *parameters})
            if made_from.get(key) != parameters.get(key)
        )
        raise InputError(f"{folder} was made with {different}; use --force to replace it, or give another folder")
    return False
