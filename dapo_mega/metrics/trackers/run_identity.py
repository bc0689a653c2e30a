"""The identity of a run over all its starts, and how far a tracker has come: files in `output_dir/tracking`."""

import contextlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_mega.atomic_files import make_way, parse_json, replace_file, set_aside


def run_id_in(folder: Path, *, is_new: bool) -> str:
    """The identity of the run whose tracking folder this is; a new one for a new run, or where there is none."""
    make_way(folder, for_folder=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    known = _read(path, {"id": str}, "has no id of the run, which begins anew in its trackers").get("id")
    if isinstance(known, str) and not is_new:
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
        known = _read(path, {"id": str, "last_step": int}, "does not say which steps the tracker has")
        is_same = known.get("id") == run_id
        late_step = known.get("last_late_step")
        self.step: int = known["last_step"] if is_same else -1
        self.late_step: int = late_step if is_same and type(late_step) is int else -1

    def has(self, step: int, *, is_late: bool) -> bool:
        """Whether the tracker has the record of this step, or of a later one."""
        return step <= (self.late_step if is_late else self.step)

    def set(self, step: int, *, is_late: bool) -> None:
        if is_late:
            self.late_step = step
        else:
            self.step = step
        values = {"id": self._run_id, "last_step": self.step, "last_late_step": self.late_step}
        replace_file(self._path, json.dumps(values) + "\n")


def _read(path: Path, needed: Mapping[str, type], problem: str) -> dict[str, Any]:
    """The values in the file, empty where there is none; one without those needed is set aside with a warning."""
    make_way(path)
    if not path.exists():
        return {}
    with contextlib.suppress(ValueError):
        values = parse_json(path.read_bytes())
        if isinstance(values, dict) and all(type(values.get(name)) is kind for name, kind in needed.items()):
            return values
    set_aside(path, problem)
    return {}
