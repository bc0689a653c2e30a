"""Manages the folders of a run's checkpoints: writes them atomically, finds the newest complete one, deletes old ones.

A checkpoint is written into `.step_N.partial`. When all its files are on disk, `manifest.json` with the name, size and
checksum of every file is added, the folder is renamed to `step_N`, the file `latest` is replaced, and old checkpoints
are deleted. The file `last_checkpoint` beside all folders says that there was one. A crash at any moment leaves the
earlier checkpoints intact.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_mega.atomic_files import checksum, make_way, replace_file

_STEP = re.compile(r"step_(\d+)")
MANIFEST_FILE = "manifest.json"
_LATEST = "latest"


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in a manifest; older checkpoints have no checksums. `crc32` is zlib's."""

    size: int
    crc32: int | None = None


class CheckpointFolders:
    """`root/step_N` for the last `keep_last` checkpoints, and for all steps that `keep_every` divides."""

    def __init__(self, root: Path, keep_last: int, keep_every: int | None = None) -> None:
        self.root = root
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.pinned: int | None = None
        """The step of a checkpoint that is kept, too."""

    @property
    def last_saved(self) -> Path:
        """The file beside `root` that names the checkpoint completed last. It stays when `root` is lost."""
        return self.root.with_name("last_checkpoint")

    def folder(self, step: int) -> Path:
        """Where the checkpoint of this step is, or would be."""
        return self.root / f"step_{step:08d}"

    def latest(self) -> Path | None:
        """Folder of the newest complete checkpoint, or None."""
        return next(self.complete_ones(), None)

    def skipped(self) -> list[str]:
        """Warnings about what a resuming run skips before `latest()`: a sentence for each damaged checkpoint, and one
        if `latest` does not name the newest completed one."""
        newest = self.latest()
        sentences = [
            f"skipping the damaged checkpoint {folder} ({problem})"
            for folder in self._steps()
            if (newest is None or folder > newest) and (problem := find_damage(folder))
        ]
        named = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            named = (self.root / _LATEST).read_text().strip()
        if named and not (self.root / named).is_dir():
            sentences.append(f"{self.root / _LATEST} names {named}, which does not exist")
        return sentences

    def complete_ones(self) -> Iterator[Path]:
        """The folders whose files all exist with the right sizes, the newest first. Does not read their contents."""
        return (folder for folder in reversed(self._steps()) if find_damage(folder) is None)

    def discard_partials(self) -> None:
        """Remove killed runs' partial checkpoints; no other run may be writing."""
        for partial in self.root.glob(".step_*.partial"):
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink()

    def partial(self, step: int) -> Path:
        """The folder that the checkpoint of `step` is written into."""
        return self.root / f".{self.folder(step).name}.partial"

    def begin(self, step: int) -> None:
        """Make an empty folder for writing the checkpoint of `step`."""
        self.discard(step)
        self.partial(step).mkdir(parents=True)

    def discard(self, step: int) -> None:
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def complete(self, step: int, checksums: Mapping[str, int] | None = None) -> None:
        """Rename the checkpoint of `step`, whose files are all on disk, to its final name, and remove old checkpoints.

        `checksums` has the checksums, by name, of files that their writers have read back; other files are read here.
        """
        partial = self.partial(step)
        write_manifest(partial, checksums)
        final = self.folder(step)
        if final.exists():
            final.rename(self.root / f".{final.name}.replaced.partial")
        partial.rename(final)
        latest = self.root / _LATEST
        if latest.is_dir():
            shutil.rmtree(latest)
        replace_file(latest, final.name)
        make_way(self.last_saved)
        replace_file(self.last_saved, f"{final.name}\n")
        self._rotate(step)

    def _rotate(self, step: int) -> None:
        """Remove checkpoints that are no longer kept. Folders newer than `step` were skipped as damaged: they do not
        count until their steps are saved again."""
        of_this_run = (folder for folder in self.complete_ones() if step_of(folder) <= step)
        last = [folder for folder, _ in zip(of_this_run, range(self._keep_last), strict=False)]
        for folder in self._steps():
            step_there = step_of(folder)
            is_kept = step_there == self.pinned or (self._keep_every is not None and step_there % self._keep_every == 0)
            if folder < last[-1] and not is_kept:
                shutil.rmtree(folder)
        self.discard_partials()

    def _steps(self) -> list[Path]:
        """All folders with the name of a checkpoint, in the order of steps."""
        found = [path for path in self.root.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found)


def write_manifest(folder: Path, checksums: Mapping[str, int] | None = None) -> None:
    """Write the manifest of a checkpoint folder whose other files are all on disk. `checksums` as in `complete`."""
    known = checksums or {}
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    records = {
        name: {"size": file.stat().st_size, "crc32": known[name] if name in known else checksum(file)}
        for name, file in files.items()
    }
    replace_file(folder / MANIFEST_FILE, json.dumps(records, indent=1))


def find_damage(folder: Path) -> str | None:
    """Why the folder is not a complete checkpoint; None if every file has the size in the manifest."""
    try:
        records = read_manifest(folder)
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except json.JSONDecodeError:
        return f"{MANIFEST_FILE} is cut off"
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST_FILE} {error}"
    for name, record in records.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != record.size:
            return f"{name} has {file.stat().st_size} of {record.size} bytes"
    return None


def find_changed_bytes(folder: Path, names: Sequence[str]) -> str | None:
    """An error text for the first of these files whose checksum is wrong; None if all checksums are right or missing.
    Reads the whole files."""
    records = read_manifest(folder)
    for name in names:
        expected = records[name].crc32
        try:
            if expected is not None and checksum(folder / name) != expected:
                return f"{name} has a wrong checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The manifest's entries by file name. Raises OSError, and ValueError for an invalid manifest."""
    content = json.loads((folder / MANIFEST_FILE).read_text())
    if not isinstance(content, dict) or not content:
        raise ValueError("lists no files")
    return {name: _file_record(name, values) for name, values in content.items()}


def _file_record(name: str, values: object) -> FileRecord:
    if type(values) is int:
        return FileRecord(values)
    match values:
        case {"size": int(size), "crc32": int(crc32)}:
            return FileRecord(size, crc32)
    raise ValueError(f"has neither size nor checksum of {name}")


def step_of(folder: Path) -> int:
    """The step that the folder of a checkpoint is named after."""
    return int(folder.name.removeprefix("step_"))
