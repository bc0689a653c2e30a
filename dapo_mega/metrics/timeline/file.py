"""The file `timeline.jsonl`: one JSON object per record of a step, as `metrics.jsonl` has them.

    {"step": 7, "start": 1764000000250000, "duration": 5000000, "spans": {"trainer": [["rollout", 0, 1200000], ...]},
     "scoring": [0, 800000, 0.0, ...], "engines": {"http://host:30000": [0, 5000000, 12.5, ...]}}

All times are whole microseconds, so that what adjoins does so exactly: `start` since 1970, of every span the time since
`start` and the duration. Loads have no gaps: they are the time since `start`, then duration and mean of each. After the
last step the same step has a second object, with the checkpoint that follows.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from dapo_mega.atomic_files import errors_naming, replace_file
from dapo_mega.metrics.jsonl import drop_from_step, step_records
from dapo_mega.metrics.timeline.records import Load, Span, StepTimeline

logger = logging.getLogger(__name__)

FILE_NAME = "timeline.jsonl"
_US = 1_000_000


def encode_timeline(timeline: StepTimeline, offset: float = 0.0) -> str:
    """One line of the file, with its newline. `offset` is added to all times and makes them Unix times."""

    def times(part: Span | Load | StepTimeline) -> tuple[int, int]:
        start, end = (round((time - timeline.start) * _US) for time in (part.start, part.end))
        return start, end - start

    def loads(parts: Sequence[Load]) -> list[float]:
        ends = [sum(times(part)) for part in parts]
        starts = [*([times(parts[0])[0]] if parts else []), *ends]
        pairs = [(end - start, round(part.mean, 2)) for part, (start, end) in zip(parts, pairwise(starts), strict=True)]
        return [*starts[:1], *chain.from_iterable(pairs)]

    record = {
        "step": timeline.step,
        "start": round((timeline.start + offset) * _US),
        "duration": times(timeline)[1],
        "spans": {lane: [[s.name, *times(s)] for s in spans] for lane, spans in timeline.spans.items()},
        "scoring": loads(timeline.scoring),
        "engines": {name: loads(parts) for name, parts in timeline.engines.items()},
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def decode_timeline(line: bytes) -> StepTimeline:
    """The inverse of `encode_timeline`. Raises ValueError for any other line."""
    try:
        record = json.loads(line)
        start = int(record["start"])

        def at(since: int) -> float:
            return (start + since) / _US

        def loads(numbers: Sequence[Any]) -> list[Load]:
            edges = pairwise(accumulate(numbers[1::2], initial=numbers[0])) if numbers else ()
            return [
                Load(at(since), at(end), float(mean)) for (since, end), mean in zip(edges, numbers[2::2], strict=True)
            ]

        if type(record["step"]) is not int:
            raise ValueError("step is no integer")
        return StepTimeline(
            step=record["step"],
            start=at(0),
            end=at(record["duration"]),
            spans={
                str(lane): [Span(str(name), at(since), at(since + duration)) for name, since, duration in spans]
                for lane, spans in record["spans"].items()
            },
            scoring=loads(record["scoring"]),
            engines={str(name): loads(parts) for name, parts in record["engines"].items()},
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a record of a timeline ({error!r})") from error


def read_timeline(path: Path) -> list[StepTimeline]:
    """The records of the file, in their order; times are Unix times in seconds.

    A last line that a crash left incomplete is ignored. Raises FileNotFoundError, or ValueError with the line number
    where any earlier line is not a record.
    """
    return [record for _, record in step_records(path, decode_timeline)]


def write_timeline(folder: Path, timelines: Sequence[StepTimeline]) -> None:
    """Make the folder, if it is not there, and the file in it with these records alone, by a clock of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FILE_NAME, "".join(map(encode_timeline, timelines)))


class TimelineWriter:
    """Appends records to the file in a run's folder. What fails ends the recording with a warning: the timeline is not
    the run."""

    def __init__(
        self,
        folder: Path,
        first_step: int,
        *,
        is_on: bool = True,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Removes what an earlier process wrote of `first_step` and later steps, which will be done again. Writes
        nothing unless `is_on`; `clock` is the one of the records that are written."""
        self._path = folder / FILE_NAME
        self._is_on = True
        self._clock, self._unix_clock = clock, unix_clock
        self._attempt(lambda: drop_from_step(self._path, first_step, lambda line: decode_timeline(line).step))
        self._is_on = self._is_on and is_on

    def write(self, timeline: StepTimeline) -> None:
        """Append the record of a step that is done."""
        if self._is_on:
            self._attempt(lambda: self._append(timeline))

    def _append(self, timeline: StepTimeline) -> None:
        with errors_naming(self._path), self._path.open("a", encoding="ascii") as file:
            file.write(encode_timeline(timeline, self._unix_clock() - self._clock()))

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError) as error:
            self._is_on = False  # After a part of a line nothing may follow.
            logger.warning("the timeline is not recorded any further: %s", error)
