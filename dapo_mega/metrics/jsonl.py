"""The file `metrics.jsonl`: one JSON object per step, `{"step": 7, "policy/entropy": 0.41, ...}`.

What becomes known of a step after later steps were recorded, as the result of an evaluation beside training, is a
second object with the same step, after theirs. `read_metrics` puts the two together.

Each line is strict JSON. JSON has no NaN and no infinities, so these are written as the strings
"NaN", "Infinity" and "-Infinity"; `read_metrics` turns them back into floats.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from dapo_mega.atomic_files import make_way, parse_json, replace_file, set_aside

R = TypeVar("R")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def encode_line(step: int, metrics: Mapping[str, float]) -> str:
    """One line of `metrics.jsonl`, with its newline."""
    record: dict[str, int | float | str] = {"step": step}
    for name, value in metrics.items():
        record[name] = float(value) if math.isfinite(value) else json.dumps(float(value))
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


def drop_from_step(
    path: Path, start_step: int, step_of: Callable[[bytes], float] = lambda line: _decode_line(line)["step"]
) -> int:
    """Remove the records with step >= `start_step`, and a torn last line, in one atomic replacement.

    `step_of` decodes a line of another file of steps; it raises ValueError for what is no record. A file with such
    lines is set aside with a warning, and goes on without them; so is what is no file.

    The other lines keep their bytes. Returns the number of complete records removed; a missing file has none.
    """
    make_way(path)
    if not path.exists():
        return 0
    content = path.read_bytes()
    *lines, last = content.split(b"\n")
    kept, num_removed, damaged = [], 0, []
    for number, line in enumerate([*lines, *([last] if last else [])], start=1):
        try:
            step = step_of(line)
        except ValueError:
            # Only the beginning of a last line can be torn: each is flushed before the next one.
            if number <= len(lines) or not line.startswith(b"{"):
                damaged.append(number)
            continue
        if step < start_step:
            kept.append(line + b"\n")
        else:
            num_removed += 1
    if damaged:
        several = f" and {len(damaged) - 1} other lines" if damaged[1:] else ""
        set_aside(path, f"has no record of a step in line {damaged[0]}{several}", b"".join(kept))
    elif b"".join(kept) != content:
        replace_file(path, b"".join(kept))
    return num_removed


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
    record = parse_json(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("not a metrics record with an integer 'step'")
    return {name: value if name == "step" else _decode_value(name, value) for name, value in record.items()}


def _decode_value(name: str, value: object) -> float:
    if value in _NOT_FINITE:
        return float(str(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise ValueError(f"the value of {name!r} is {value!r}, not a number")
