"""Cost of recording the timeline of a step: what is added to every request, and what is written with the step.

python tools/benchmark.py timeline

Requests start and end in the order of a step whose engines are full for most of it; the record is then made and
written. Nothing else runs, so the seconds are those that a run's rank 0 needs on top.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmark_timing import Duration, measure, median_cpu

from dapo_mega.cli import run_command
from dapo_mega.metrics.timeline import Activity, LoadHistory
from dapo_mega.metrics.timeline.file import FILE_NAME, TimelineWriter
from dapo_mega.metrics.timeline.load import segments_each

_STAGES = ("rollout", "pack", "score", "update", "samples", "weight_sync", "checkpoint")
_STEP_S = 100.0


def run(options: argparse.Namespace) -> list[str]:
    """Measure and return the report's lines."""
    random = np.random.default_rng(0)
    starts = random.uniform(0, 0.4 * _STEP_S, options.requests)
    ends = starts + random.lognormal(2.0, 0.8, options.requests)
    changes = sorted([(time, 1) for time in starts.tolist()] + [(time, -1) for time in ends.tolist()])
    owners = random.integers(options.engines, size=len(changes)).tolist()
    counting: list[Duration] = []
    writing: list[Duration] = []
    with tempfile.TemporaryDirectory() as name:
        writer = TimelineWriter(Path(name), 0)
        for step in range(options.steps):
            began = step * _STEP_S
            engines = [LoadHistory(began) for _ in range(options.engines)]
            activity = Activity(lambda: 0.0)

            def count(engines: Sequence[LoadHistory] = engines, began: float = began) -> None:
                for owner, (time, by) in zip(owners, changes, strict=True):
                    engines[owner].change(began + time, by)

            def write(
                engines: Sequence[LoadHistory] = engines, activity: Activity = activity, step: int = step
            ) -> None:
                for stage in _STAGES:
                    with activity.span("trainer", stage):
                        pass
                end = (step + 1) * _STEP_S
                most = segments_each(len(engines))
                loads = {f"http://10.0.0.{i}:30000": load.pop(end, most) for i, load in enumerate(engines)}
                writer.write(activity.pop(step, loads))

            counting.append(measure(count))
            writing.append(measure(write))
        size = (Path(name) / FILE_NAME).stat().st_size / options.steps
    counted, written = median_cpu(counting), median_cpu(writing)
    return [
        f"{options.engines} engines, {options.requests:,} requests a step, medians of {options.steps} steps",
        "| part | figure |",
        "|---|---|",
        f"| counting the open requests, beside training | {1000 * counted:.1f} ms, "
        f"{1e6 * counted / options.requests:.1f} us a request |",
        f"| making and writing the record, while training waits | {1000 * written:.1f} ms |",
        f"| the shortest step of which both are 0.5 % | {200 * (counted + written):.1f} s |",
        f"| size of 1,000 steps | {size / 1000:.1f} MB |",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmark timeline", description=__doc__)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8192, help="requests of a step, over all engines")
    parser.add_argument("--steps", type=int, default=10)
    print("\n".join(run(parser.parse_args(argv))))


if __name__ == "__main__":
    run_command(main)
