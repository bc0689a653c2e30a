"""Keeps finished work beside an output that is not there yet, so that a command that was killed does it only once."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dapo_mega.atomic_files import errors_naming, parse_json
from dapo_mega.errors import InputError

_SHOWN_CHARACTERS = 80


def journal_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal.jsonl")


class Journal:
    """Results by row, in a file of lines that only grows.

    The first line holds what the results depend on, each other line the row's number and its result. A line that was
    not written whole, and what follows it, is dropped: that work is done again.
    """

    def __init__(self, file: IO[bytes], path: Path, entries: dict[int, Any]) -> None:
        self.entries = entries
        self._file = file
        self._path = path

    def add(self, row: int, result: Any) -> None:
        """Keep the result of a row. It outlives this process as soon as this returns."""
        with errors_naming(self._path):
            self._file.write(_line([row, result]))
            self._file.flush()
        self.entries[row] = result

    def remove(self) -> None:
        """Delete the file, once the output is there."""
        self._path.unlink(missing_ok=True)


@contextmanager
def open_journal(path: Path, depends_on: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal at `path`, with the results of an earlier call that depended on the same.

    Raises InputError, naming the difference, if that call was another one, and if another process writes here now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with errors_naming(path), path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{path} is in use by another process; wait for it, or give another output") from None
        given = json.loads(json.dumps(depends_on))
        entries: dict[int, Any] = {}
        file.seek(0)
        head = file.readline()
        earlier = _parsed(head)
        if head.endswith(b"\n"):
            entries, end = _read(file, len(head))
        # Without a result it does not matter what results would have depended on.
        if not head.endswith(b"\n") or (isinstance(earlier, dict) and not entries):
            file.truncate(0)
            file.write(_line(given))
            file.flush()
            end = file.tell()
        else:
            _check_same(path, earlier, given)
        file.truncate(end)
        file.seek(end)
        os.fsync(file.fileno())
        yield Journal(file, path, entries)


def _read(file: IO[bytes], end: int) -> tuple[dict[int, Any], int]:
    """The entries, and where the last whole one ends."""
    entries: dict[int, Any] = {}
    for line in file:
        found = _parsed(line) if line.endswith(b"\n") else None
        if not (isinstance(found, list) and len(found) == 2 and type(found[0]) is int):
            break
        entries[found[0]] = found[1]
        end += len(line)
    return entries, end


def _check_same(path: Path, earlier: Any, given: Mapping[str, Any]) -> None:
    if earlier == given:
        return
    if not isinstance(earlier, dict):
        raise InputError(f"{path} is no journal of this command; move it away, or give another output")
    names = [name for name in {**earlier, **given} if earlier.get(name) != given.get(name)]
    changes = ", ".join(f"{name}={_shown(earlier.get(name))} (now {_shown(given.get(name))})" for name in names)
    raise InputError(
        f"{path} has results of a call with {changes}; give the same again to continue it, another output, or delete "
        f"this file to begin anew"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _line(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass") + b"\n"
