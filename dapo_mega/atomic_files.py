"""Writes small files atomically, and reads files of other programs with clear errors."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from dapo_mega.errors import InputError

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2**22
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SPECIAL = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write `path` so that readers, and a run after a crash, see the old or the new content, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with errors_naming(path), open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def set_aside(path: Path, problem: str, readable: bytes | None = None) -> None:
    """Keep what stands at `path` under another name, with a warning. Afterwards the file holds what was `readable`;
    None: nothing stands there."""
    # TensorBoard reads every file with "tfevents" in its name.
    names = (f"{path.name.replace('tfevents', 'events')}.damaged-{number}" for number in itertools.count(1))
    kept = next(aside for name in names if not os.path.lexists(aside := path.with_name(name)))
    if readable is None:
        path.rename(kept)
    else:
        shutil.copyfile(path, kept)
        replace_file(path, readable)
    logger.warning("%s %s; it is kept as %s, and the run goes on with what could be read", path, problem, kept.name)


def make_way(path: Path, *, for_folder: bool = False) -> None:
    """Set aside what stands where a run keeps a file, or a folder, of its own, unless it is one that can be read and
    written."""
    is_right = path.is_dir() if for_folder else path.is_file() and os.access(path, os.R_OK | os.W_OK)
    if os.path.lexists(path) and not is_right:
        is_readable = not for_folder and path.is_file() and os.access(path, os.R_OK)
        problem = f"is no {'folder' if for_folder else 'file'} that can be read and written"
        set_aside(path, problem, path.read_bytes() if is_readable else None)


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add `path` to operating system errors in this block, because a full disk's error does not name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


_REFUSALS = ("No space left on device", "Disk quota exceeded", "File too large")


def disk_refusal(error: BaseException) -> str | None:
    """The disk error behind a library's error that does not show it, such as torch's "unexpected pos".

    Searches the error's causes, and its text, which may be the traceback of another process.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return f"{behind.filename}: {behind.strerror}" if behind.filename else behind.strerror
        behind = behind.__cause__ or behind.__context__
    found = next((refusal for refusal in _REFUSALS if refusal in str(error)), None)
    if found is None and "unexpected pos" in str(error):
        return "only a part was written to the disk, which is full or failing"
    return found


def checksum(file: Path) -> int:
    """CRC-32 of a file, as zlib computes it."""
    value = 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE_BYTES):
            value = zlib.crc32(piece, value)
    return value


def check_regular(file: Path, remedy: str = "copy the checkpoint again") -> None:
    """Raises InputError for a file on which opening or reading would hang or fail with a misleading error; `remedy` is
    what helps if it is missing.

    Links are followed: the files of a Hugging Face cache are links.
    """
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        what = "is a link to a file that does not exist" if file.is_symlink() else "is missing"
        raise InputError(f"{file} {what}; {remedy}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({_reason(error)}); correct the path or its permissions") from error
    kind = _SPECIAL.get(stat.S_IFMT(mode))
    if kind:
        raise InputError(f"{file} is {kind}, not a file; remove it, or copy the checkpoint again")


def refuse_special_files(folder: Path) -> None:
    """Raises InputError if the folder has a FIFO, socket or device, on which a library would hang."""
    for file in sorted(folder.iterdir()):
        try:
            kind = _SPECIAL.get(stat.S_IFMT(file.stat().st_mode))
        except OSError:
            continue  # Such as a dangling link, which is an error only if the file is needed.
        if kind and not file.is_dir():
            raise InputError(f"{file} is {kind}, not a file; remove it, or copy the checkpoint again")


def open_regular(file: Path) -> bytes:
    """Read a file. Raises InputError with its name and the cause if this fails."""
    check_regular(file)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({_reason(error)}); correct its permissions, or copy it again"
        ) from error
    refuse_lfs_pointer(file, content)
    return content


def refuse_lfs_pointer(file: Path, start: bytes) -> None:
    """Raises InputError if the file's first bytes `start` are those of a git-lfs pointer."""
    if start.startswith(_LFS_POINTER):
        raise InputError(
            f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` in the folder that was cloned"
        )


def inside(name: str) -> bool:
    """Whether the listed path `name` is inside the folder or one of its sub-folders."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for text that is not JSON, nested too deeply or not UTF-8."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(file: Path, remedy: str = "copy the checkpoint again") -> dict[str, Any]:
    """The JSON object in a file. Raises InputError with the file's name and the remedy for any other content."""
    check_regular(file, remedy)
    try:
        found = parse_json(open_regular(file))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} holds no JSON object; {remedy}")
    return found


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
