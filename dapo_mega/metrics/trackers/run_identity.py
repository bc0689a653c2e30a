"""The identity of a run over all its starts, and how far a tracker has come: files in `output_dir/tracking`."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from dapo_mega.atomic_files import replace_file


def run_id_in(folder: Path, *, is_new: bool) -> str:
    """The identity of the run whose tracking folder this is; a new one for a new run, or where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    known = None if is_new else _read(path).get("id")
    if isinstance(known, str):
        return known
    run_id = uuid.uuid4().hex[:12]
    replace_file(path, json.dumps({"id": run_id}) + "\n")
    return run_id


class LastStep:
    """The last step of a run that a tracker has, in a file that outlives the tracker's process. `late_step` is the last
    one of which it has what came after the records of later steps."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        known = _read(path)
        is_same = known.get("id") == run_id
        self.step: int = known["last_step"] if is_same else -1
        self.late_step: int = known.get("last_late_step", -1) if is_same else -1

    def has(self, step: int, *, is_late: bool) -> bool:
        """Whether the tracker has the record of this step, or of a later one."""
        return step <= (self.late_step if is_late else self.step)

    def set(self, step: int, *, is_late: bool) -> None:
        """Remember that the tracker has this record."""
        if is_late:
            self.late_step = step
        else:
            self.step = step
        values = {"id": self._run_id, "last_step": self.step, "last_late_step": self.late_step}
        replace_file(self._path, json.dumps(values) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
