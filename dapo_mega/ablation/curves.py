"""Draws the arms' curves over one another: per arm the mean over its seeds, in a band from lowest to highest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dapo_mega.ablation.results import ArmResult, Records
from dapo_mega.metrics.plotting import empty_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (
    ("Held-out accuracy", "avg@k", "evaluation/avg_at_k"),
    ("Response length", "mean tokens", "rollout/response_length_mean"),
    ("Generation entropy", "nats per token", "policy/entropy"),
)
_TITLES = {"ladder": "Table 1", "methods": "methods"}
_NUM_COLORS = 20


def draw_curves(results: Sequence[ArmResult], output: Path) -> None:
    """Write the PNG file `output`: a row of panels for the ladder and one for the methods."""
    groups = list(dict.fromkeys(result.arm.group for result in results))
    figure = empty_figure(15, 4.6 * len(groups))
    for number, group in enumerate(groups):
        arms = [result for result in results if result.arm.group == group]
        panels = [figure.add_subplot(len(groups), 3, 3 * number + column) for column in (1, 2, 3)]
        for axes, (title, label, metric) in zip(panels, _PANELS, strict=True):
            _draw_panel(axes, arms, metric)
            axes.set(title=f"{title} ({_TITLES[group]})", xlabel="step", ylabel=label)
            axes.grid(alpha=0.3)
        if panels[0].get_legend_handles_labels()[0]:
            panels[0].legend(fontsize="x-small")
    save_png(figure, output)


def band(runs: Sequence[Records], metric: str) -> Mapping[int, tuple[float, float, float]]:
    """Mean, lowest and highest value over the runs at each step at which all of them have a finite one."""
    by_run = [{int(r["step"]): r[metric] for r in run if metric in r and np.isfinite(r[metric])} for run in runs]
    steps = sorted(set.intersection(*(set(values) for values in by_run))) if by_run else []
    found = {}
    for step in steps:
        values = [values[step] for values in by_run]
        found[step] = (float(np.mean(values)), min(values), max(values))
    return found


def _draw_panel(axes: Axes, arms: Sequence[ArmResult], metric: str) -> None:
    from matplotlib import colormaps

    for index, arm in enumerate(arms):
        points = band([result.records for result in arm.finished], metric)
        if not points:
            continue
        mean, low, high = zip(*points.values(), strict=True)
        # A palette of pairs: the strong colours first.
        color = colormaps["tab20"]((2 * index) % _NUM_COLORS + (2 * index) // _NUM_COLORS % 2)
        marker = "." if len(points) <= 30 else None
        axes.plot(list(points), mean, color=color, label=arm.arm.title, marker=marker)
        axes.fill_between(list(points), low, high, color=color, alpha=0.15, linewidth=0)
