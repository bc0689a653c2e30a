"""The folders of a run's checkpoints: which is the newest complete one, and which may go.

A checkpoint is written into `.step_N.partial`. When everything else is on disk, `manifest.json` with the name and size
of every file is added, the folder is renamed to `step_N`, the file `latest` is replaced, and old checkpoints go. A
crash at any moment leaves the checkpoints before as they were.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dapo_mega.files import replace_file

_STEP = re.compile(r"step_(\d+)")
MANIFEST_FILE = "manifest.json"
_LATEST = "latest"


class CheckpointFolders:
    """`root/step_N` for the last `keep_last` checkpoints, and for all steps that `keep_every` divides."""

    def __init__(self, root: Path, keep_last: int, keep_every: int | None) -> None:
        self.root = root
        self._keep_last = keep_last
        self._keep_every = keep_every

    def newest(self) -> Path | None:
        """Folder of the newest complete checkpoint, or None."""
        return next(self._complete(), None)

    def skipped(self) -> list[str]:
        """What a resuming run passes over on the way to `newest()`: a sentence for each damaged checkpoint, and one
        where `latest` names another than the newest that was completed."""
        newest = self.newest()
        sentences = [
            f"skipping the damaged checkpoint {folder} ({problem})"
            for folder in self._steps()
            if (newest is None or folder > newest) and (problem := find_damage(folder))
        ]
        named = self._named_latest()
        if named and not (self.root / named).is_dir():
            sentences.append(f"{self.root / _LATEST} names {named}, which does not exist")
        return sentences

    def partial(self, step: int) -> Path:
        """The folder that the checkpoint of `step` is written into."""
        return self.root / f".{_name(step)}.partial"

    def begin(self, step: int) -> None:
        """Make the folder to write the checkpoint of `step` into, empty."""
        self.discard(step)
        self.partial(step).mkdir(parents=True)

    def discard(self, step: int) -> None:
        """Remove what was written of the checkpoint of `step`."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def complete(self, step: int) -> None:
        """Give the checkpoint of `step` its name, all its files being on disk, and remove those no longer kept."""
        partial = self.partial(step)
        write_manifest(partial)
        final = self.root / _name(step)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        replace_file(self.root / _LATEST, final.name)
        self._rotate()

    def _rotate(self) -> None:
        last = [folder for folder, _ in zip(self._complete(), range(self._keep_last), strict=False)]
        for folder in self._steps():
            is_kept = self._keep_every is not None and _step_of(folder) % self._keep_every == 0
            if folder < last[-1] and not is_kept:
                shutil.rmtree(folder)
        for partial in self.root.glob(".step_*.partial"):
            shutil.rmtree(partial)

    def _complete(self) -> Iterator[Path]:
        """Complete checkpoints, the newest first."""
        return (folder for folder in reversed(self._steps()) if find_damage(folder) is None)

    def _steps(self) -> list[Path]:
        """All folders with the name of a checkpoint, in the order of steps."""
        found = [path for path in self.root.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found)

    def _named_latest(self) -> str | None:
        file = self.root / _LATEST
        return file.read_text().strip() if file.is_file() else None


def write_manifest(folder: Path) -> None:
    """List what is in the folder of a checkpoint, whose other files are all on disk."""
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    replace_file(folder / MANIFEST_FILE, json.dumps(sizes, indent=1))


def find_damage(folder: Path) -> str | None:
    """Why the folder is not a complete checkpoint; None where every file has the size it was written with."""
    try:
        sizes = json.loads((folder / MANIFEST_FILE).read_text())
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except ValueError:
        return f"{MANIFEST_FILE} is cut off"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    return None


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
