"""A run in Trackio."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import trackio

from dapo_mega.metrics.run_text import EXAMPLES_TAG, examples_as_markdown
from dapo_mega.metrics.trackers.records import Record, TrackedRun


class TrackioRun:
    """Metrics under their names, which Trackio groups by what stands before the slash; histograms; samples as text.

    Trackio continues the run of the same name, so the name ends with the run's identity, and stays the first one.
    """

    def __init__(self, run: TrackedRun) -> None:
        if run.offline:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        name, known = f"{run.name}-{run.id[:6]}", Path(run.folder, "trackio_name.txt")
        if known.is_file() and known.read_text().endswith(run.id[:6]):
            name = known.read_text()
        else:
            known.write_text(name)
        self._run = trackio.init(
            project=run.project,
            name=name,
            space_id=run.trackio_space,
            private=True,
            config={**run.config, "versions": dict(run.versions)},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.url = f"https://huggingface.co/spaces/{run.trackio_space}" if run.trackio_space else None

    def log(self, record: Record) -> None:
        values: dict[str, Any] = dict(record.metrics)
        for name, histogram in record.histograms.items():
            edges = np.array(histogram.edges())
            values[name] = trackio.Histogram(np_histogram=(np.array(histogram.counts), edges))
        if record.examples:
            values[EXAMPLES_TAG] = trackio.Markdown(examples_as_markdown(record.examples))
        trackio.log(values, step=record.step)

    def finish(self, *, is_finished: bool) -> None:
        """See `Tracker`. Trackio does not tell a finished run from a stopped one."""
        trackio.finish()
