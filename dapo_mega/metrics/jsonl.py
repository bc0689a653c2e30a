"""The file `metrics.jsonl`: one JSON object per step, `{"step": 7, "policy/entropy": 0.41, ...}`.

What becomes known of a step after later steps were recorded, as the result of an evaluation beside training, is a
second object with the same step, after theirs. `read_metrics` puts the two together.

Each line is strict JSON. JSON has no NaN and no infinities, so these are written as the strings
"NaN", "Infinity" and "-Infinity"; `read_metrics` turns them back into floats.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from dapo_mega.atomic_files import replace_file

R = TypeVar("R")
_FROM_TEXT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_line(step: int, metrics: Mapping[str, float]) -> str:
    """One line of `metrics.jsonl`, with its newline."""
    record: dict[str, int | float | str] = {"step": step}
    record.update({name: _encode_value(float(value)) for name, value in metrics.items()})
    return json.dumps(record, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a `metrics.jsonl`, one per step in rising order; `step` is an int, all else floats.

    A last line that a crash left incomplete is ignored. Raises FileNotFoundError, or ValueError with
    the line number where any earlier line is not a record.
    """
    by_step: dict[float, dict[str, float]] = {}
    for _, record in step_records(path, _decode_line):
        by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


def _step_of(line: bytes) -> float:
    return _decode_line(line)["step"]


def drop_from_step(path: Path, start_step: int, step_of: Callable[[bytes], float] = _step_of) -> int:
    """Remove the records with step >= `start_step`, and a torn last line, in one atomic replacement.

    `step_of` decodes a line of another file of steps; it raises ValueError for what is no record.

    The other lines keep their bytes. Returns the number of complete records removed; a missing file
    has none. Raises ValueError as `read_metrics`.
    """
    if not path.exists():
        return 0
    records = list(step_records(path, step_of))
    kept = [line for line, step in records if step < start_step]
    content = b"".join(line + b"\n" for line in kept)
    if content != path.read_bytes():
        replace_file(path, content)
    return len(records) - len(kept)


def _encode_value(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def step_records(path: Path, decode: Callable[[bytes], R]) -> Iterator[tuple[bytes, R]]:
    """The lines of a file of steps, each with what `decode` finds in it; a torn last line is left out.

    Raises FileNotFoundError, or ValueError with the line number where `decode` raises one for an earlier line.
    """
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            record = decode(line)
        except ValueError as error:
            # Only the last line can be torn: each line is flushed before the next one is begun.
            if number == len(lines):
                return
            raise ValueError(
                f"{path}, line {number}: {error}; remove or repair that line, or move the file away"
            ) from error
        yield line, record


def _decode_line(line: bytes) -> dict[str, float]:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("not a metrics record with an integer 'step'")
    return {name: value if name == "step" else _decode_value(name, value) for name, value in record.items()}


def _decode_value(name: str, value: object) -> float:
    if isinstance(value, str) and value in _FROM_TEXT:
        return _FROM_TEXT[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"the value of {name!r} is {value!r}, not a number")
