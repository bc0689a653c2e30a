"""What a tracker's process is told, as JSON lines: first the run, then a record per step."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dapo_mega.metrics.histogram import Histogram
from dapo_mega.metrics.run_text import Example


@dataclass(frozen=True)
class TrackedRun:
    """A run and where to send it. `id` is the run's identity over all its starts; `folder` is for the tracker's files
    and its log. Within `close_limit_s` after its last record, or after the trainer `trainer_pid` is gone, the tracker's
    process must end."""

    id: str
    name: str
    project: str
    folder: str
    trainer_pid: int
    close_limit_s: float
    entity: str | None = None
    mlflow_uri: str | None = None
    trackio_space: str | None = None
    offline: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    hyper_parameters: Mapping[str, bool | float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Record:
    """What a run records of one step. `is_late`: it adds to the record of this step, and comes after those of later
    steps."""

    step: int
    metrics: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    is_late: bool = False

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        values = json.loads(line)
        histograms = values["histograms"].items()
        return cls(
            values["step"],
            values["metrics"],
            {name: Histogram(h["low"], h["high"], tuple(h["counts"])) for name, h in histograms},
            tuple(Example(**example) for example in values["examples"]),
            values["is_late"],
        )


def end_line(*, is_finished: bool) -> str:
    """The line after the last record; `is_finished` says whether the run has all its steps."""
    return json.dumps({"end": "finished" if is_finished else "stopped"}) + "\n"
