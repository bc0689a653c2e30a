"""Writes each step to `metrics.jsonl`, to TensorBoard, and to the trackers that the run has."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from dapo_mega.metrics.histogram import Histogram
from dapo_mega.metrics.jsonl import drop_from_step, encode_line
from dapo_mega.metrics.run_text import EXAMPLES_TAG, Example, RunDescription, examples_as_markdown
from dapo_mega.metrics.trackers import BackgroundTracker, Record, close_all

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z][a-z0-9_]*/[A-Za-z0-9][A-Za-z0-9_.@-]*")


class MetricsWriter:
    """Writes one record per step to `log_dir/tensorboard` and to `log_dir/metrics.jsonl`, and a second one for what
    becomes known of a step later.

    A run that resumes gives the step it starts from: what an earlier run recorded from that step on is
    removed from both, so that each step is there once. One process writes to a `log_dir`. Each record
    is on disk when `write` returns: a kill loses at most the record being written.
    """

    def __init__(
        self,
        log_dir: Path,
        start_step: int = 0,
        run: RunDescription | None = None,
        trackers: Sequence[BackgroundTracker] = (),
    ) -> None:
        """Raises ValueError if `start_step` is negative."""
        if start_step < 0:
            raise ValueError(f"start_step is {start_step}; expected a step >= 0")
        # Imported here: it takes seconds, and readers of metrics.jsonl do not need it.
        from dapo_mega.metrics.tensorboard import TensorBoardLog

        log_dir.mkdir(parents=True, exist_ok=True)
        self._path = log_dir / "metrics.jsonl"
        num_dropped = drop_from_step(self._path, start_step)
        if num_dropped:
            logger.info(
                "removed %d records of an earlier run from step %d on from %s", num_dropped, start_step, self._path
            )
        self._tensorboard = TensorBoardLog(log_dir / "tensorboard", start_step)
        if run is not None:
            self._tensorboard.describe_run(run)
        self._trackers = trackers
        self._file = self._path.open("a", encoding="ascii")
        self._next_step = start_step

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        histograms: Mapping[str, Histogram] | None = None,
        examples: Sequence[Example] = (),
    ) -> None:
        """Write the record of one step: once per step, in rising order, steps may be left out.

        Histograms and examples, of the step's evaluation, are not written to `metrics.jsonl`.

        Raises ValueError, and writes nothing, for a malformed name, a step before `start_step`, a step
        at or before the last one written, or after `close`.
        """
        if step < self._next_step:
            raise ValueError(
                f"step {step} is already written or before the start; the next step is {self._next_step} "
                "or later. Put all metrics of a step in one call"
            )
        self._write(Record(step, metrics, histograms or {}, tuple(examples)))
        self._next_step = step + 1

    def add(self, step: int, metrics: Mapping[str, float], examples: Sequence[Example] = ()) -> None:
        """Write what has become known of an earlier step: once per step, in rising order.

        Raises ValueError, and writes nothing, for a malformed name, a step that is not written yet, or after `close`.
        """
        if step >= self._next_step:
            raise ValueError(f"step {step} is not written yet; put all metrics of a new step in one call of write")
        self._write(Record(step, metrics, examples=tuple(examples), is_late=True))

    def _write(self, record: Record) -> None:
        if self._file.closed:
            raise ValueError(f"cannot write step {record.step}: the writer of {self._path} is closed")
        for name in (*record.metrics, *record.histograms):
            validate_metric_name(name)
        self._file.write(encode_line(record.step, record.metrics))
        self._file.flush()
        os.fsync(self._file.fileno())
        texts = {EXAMPLES_TAG: examples_as_markdown(record.examples)} if record.examples else {}
        self._tensorboard.write(record.step, record.metrics, record.histograms, texts)
        if self._trackers:
            record = replace(record, metrics={name: float(value) for name, value in record.metrics.items()})
            for tracker in self._trackers:
                tracker.log(record)

    def close(self, *, is_finished: bool = False) -> None:
        """Close all outputs; a second call does nothing. Trackers of a run that has all its steps are waited for."""
        if not self._file.closed:
            self._file.close()
            self._tensorboard.close()
            close_all(self._trackers, is_finished=is_finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(is_finished=kind is None)


def validate_metric_name(name: str) -> None:
    """Check that `name` has the form `stage/name`; raises ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"metric name {name!r} does not have the form 'stage/name', such as 'policy/entropy': "
            "a lower-case stage, one slash, then letters, digits and any of '_.@-'"
        )
