"""What is recorded of a step's time: work with a name, and how much of something was open."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Work from `start` to `end`, in seconds of one clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Load:
    """How many things were open on average from `start` to `end`, in seconds of one clock."""

    start: float
    end: float
    mean: float


@dataclass(frozen=True)
class StepTimeline:
    """What was done from `start`, when the step before was recorded, to `end`, when `step` was.

    `spans` are the lanes of the trainer: spans of one lane do not overlap. `scoring` says how many responses were being
    scored, `engines` how many requests each engine had open, by name.
    """

    step: int
    start: float
    end: float
    spans: Mapping[str, Sequence[Span]]
    scoring: Sequence[Load]
    engines: Mapping[str, Sequence[Load]]
