"""The part of a recorded timeline that some steps cover."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from dapo_mega.errors import InputError
from dapo_mega.metrics.timeline.file import FILE_NAME, read_timeline
from dapo_mega.metrics.timeline.records import Load, Span, StepTimeline

NUM_SHOWN = 3
"""The number of steps that are shown where nobody says which: the last ones."""

P = TypeVar("P", Span, Load)


@dataclass(frozen=True)
class Excerpt:
    """All that was done at some time from `start` to `end`, in seconds of Unix time.

    `steps` are spans from record to record. Lanes and engines come in the order of their names.
    """

    start: float
    end: float
    steps: Sequence[Span]
    spans: Mapping[str, Sequence[Span]]
    scoring: Sequence[Load]
    engines: Mapping[str, Sequence[Load]]


def load_excerpt(run_dir: Path, first: int | None = None, last: int | None = None) -> Excerpt:
    """What a run's folder holds of the steps from `first` to `last`; None is the first or last that there is, and
    without either the last three count.

    Raises InputError for a folder without a timeline and for steps that it does not have.
    """
    path = run_dir / FILE_NAME
    if not run_dir.is_dir():
        raise InputError(f"run folder {run_dir} does not exist")
    if not path.is_file():
        raise InputError(f"run folder {run_dir} holds no {FILE_NAME}; train with tracking.timeline=true to record one")
    try:
        timelines = read_timeline(path)
    except ValueError as error:
        raise InputError(str(error)) from error
    if not timelines:
        raise InputError(f"{path} holds no complete step yet")
    steps = sorted({timeline.step for timeline in timelines})
    if first is None and last is None:
        first = steps[-NUM_SHOWN:][0]
    first, last = steps[0] if first is None else first, steps[-1] if last is None else last
    if first > last or first < steps[0] or last > steps[-1]:
        raise InputError(
            f"steps {first} to {last} are not in {path}, which holds {steps[0]} to {steps[-1]}; choose steps of these"
        )
    chosen = [timeline for timeline in timelines if first <= timeline.step <= last]
    if not chosen:
        raise InputError(f"{path} holds nothing of steps {first} to {last}; choose others")
    return excerpt_of(timelines, min(t.start for t in chosen), max(t.end for t in chosen))


def excerpt_of(timelines: Sequence[StepTimeline], start: float, end: float) -> Excerpt:
    """What was done at some time from `start` to `end`, whichever step it was recorded with."""

    def within(parts: Sequence[P]) -> list[P]:
        return [part for part in parts if part.start < end and part.end > start]

    words = ["step"] + ["after step" if t.step == before.step else "step" for before, t in pairwise(timelines)]
    lanes = {lane: None for timeline in timelines for lane in timeline.spans}
    engines = {name: None for timeline in timelines for name in timeline.engines}
    spans = {lane: within([s for t in timelines for s in t.spans.get(lane, ())]) for lane in sorted(lanes)}
    loads = {name: within([load for t in timelines for load in t.engines.get(name, ())]) for name in sorted(engines)}
    return Excerpt(
        start,
        end,
        within([Span(f"{word} {t.step}", t.start, t.end) for word, t in zip(words, timelines, strict=True)]),
        {lane: found for lane, found in spans.items() if found},
        within([load for timeline in timelines for load in timeline.scoring]),
        {name: found for name, found in loads.items() if found},
    )
