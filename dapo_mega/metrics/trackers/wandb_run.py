"""A run in Weights & Biases."""

import os
from typing import Any

import numpy as np
import wandb

from dapo_mega.metrics.run_text import EXAMPLES_TAG, shortened
from dapo_mega.metrics.trackers.records import Record, TrackedRun

_LATE_STEP = "evaluation_step"


class WandbRun:
    """Metrics under their names, which wandb groups by what stands before the slash; histograms; a table of samples.

    wandb takes steps in rising order only. What comes late is therefore in the row of the newest step, with the step
    that it belongs to beside it, and wandb draws it over that.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = wandb.init(
            project=run.project,
            entity=run.entity,
            id=run.id,
            name=run.name,
            dir=run.folder,
            resume="allow",
            mode="offline" if run.offline else None,
            settings=wandb.Settings(console="off", save_code=False, disable_git=True, disable_job_creation=True),
        )
        self._run.config.update({**run.config, "versions": dict(run.versions)}, allow_val_change=True)
        self.url: str | None = None if self._run.offline else self._run.url

    def log(self, record: Record) -> None:
        values: dict[str, Any] = dict(record.metrics)
        for name, histogram in record.histograms.items():
            values[name] = wandb.Histogram(np_histogram=(np.array(histogram.counts), np.array(histogram.edges())))
        if record.examples:
            columns = ["prompt", "response", "correct", "answer", "ground truth"]
            rows = [
                [shortened(e.prompt), shortened(e.response), e.is_correct, e.answer, e.ground_truth]
                for e in record.examples
            ]
            values[EXAMPLES_TAG] = wandb.Table(columns=columns, data=rows)
        if record.is_late:
            self._run.define_metric("evaluation/*", step_metric=_LATE_STEP)
            # Without commit, as the next step may be the one that a resumed run stands at.
            self._run.log({**values, _LATE_STEP: record.step}, commit=False)
        else:
            self._run.log(values, step=record.step)

    def finish(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)
