"""Writes each step's metrics to TensorBoard and to `metrics.jsonl`."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from dapo_mega.metrics.jsonl import drop_from_step, encode_line
from dapo_mega.metrics.names import validate_metric_name

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes one record per step to `log_dir/tensorboard` and to `log_dir/metrics.jsonl`.

    A run that resumes gives the step it starts from: what an earlier run recorded from that step on is
    removed from both, so that each step is there once. One process writes to a `log_dir`. Each record
    is on disk when `write` returns: a kill loses at most the record being written.
    """

    def __init__(self, log_dir: Path, start_step: int = 0) -> None:
        """Raises ValueError if `start_step` is negative or an existing metrics.jsonl is not readable."""
        if start_step < 0:
            raise ValueError(f"start_step is {start_step}; expected a step >= 0")
        # Imported here: it takes seconds, and readers of metrics.jsonl do not need it.
        from torch.utils.tensorboard import SummaryWriter

        log_dir.mkdir(parents=True, exist_ok=True)
        self._path = log_dir / "metrics.jsonl"
        num_dropped = drop_from_step(self._path, start_step)
        if num_dropped:
            logger.warning(
                "removed %d records of an earlier run from step %d on from %s",
                num_dropped,
                start_step,
                self._path,
            )
        _wait_for_a_later_file_name(log_dir / "tensorboard")
        self._tensorboard = SummaryWriter(str(log_dir / "tensorboard"), purge_step=start_step)
        self._file = self._path.open("a", encoding="ascii")
        self._next_step = start_step

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the record of one step: once per step, in rising order, steps may be left out.

        Raises ValueError, and writes nothing, for a malformed name, a step before `start_step`, a step
        at or before the last one written, or after `close`.
        """
        if self._file.closed:
            raise ValueError(f"cannot write step {step}: the writer of {self._path} is closed")
        if step < self._next_step:
            raise ValueError(
                f"step {step} is already written or before the start; the next step is {self._next_step} "
                "or later. Put all metrics of a step in one call"
            )
        for name in metrics:
            validate_metric_name(name)
        self._file.write(encode_line(step, metrics))
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, float(value), step)
        self._tensorboard.flush()
        self._next_step = step + 1

    def close(self) -> None:
        """Close both outputs; a second call does nothing."""
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _wait_for_a_later_file_name(tensorboard_dir: Path) -> None:
    """Wait until a new event file sorts behind all existing ones; at most two seconds, else warn.

    TensorBoard reads event files in the order of their names, `events.out.tfevents.<second>.<host>...`.
    A resumed run's file must come last, or the steps that it purges would purge its own.
    """
    existing = [path.name.split(".")[3] for path in tensorboard_dir.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in existing if second.isdecimal()), default=0)
    delay = newest + 1 - time.time()
    if delay > 2:
        logger.warning(
            "event files in %s are %.0f s ahead of this machine's clock: TensorBoard may show steps of the "
            "earlier run; metrics.jsonl is right",
            tensorboard_dir,
            delay,
        )
    elif delay > 0:
        time.sleep(delay)
