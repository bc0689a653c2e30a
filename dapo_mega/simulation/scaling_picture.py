"""Draws steps per hour and efficiency against the number of GPUs, both on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.metrics.plotting import empty_figure, save_png
from dapo_mega.simulation.scaling import FORMS, ScalingPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = ("o", "s")


def draw_scaling(points: Sequence[ScalingPoint], title: str, output: Path) -> None:
    """Write the PNG file `output`; numbers of GPUs on which nothing fits have no mark."""
    figure = empty_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    sizes = sorted({point.num_gpus for point in points})
    best = max(points, key=lambda point: point.per_gpu)
    left.plot(sizes, [best.per_gpu * size for size in sizes], color="grey", linestyle=":", label="as many more as GPUs")
    for form, marker in zip(FORMS, _MARKERS, strict=True):
        of_form = [point for point in points if point.form == form and point.run]
        counts = [point.num_gpus for point in of_form]
        left.plot(counts, [point.steps_per_hour for point in of_form], marker=marker, label=form)
        right.plot(counts, [100 * point.per_gpu / best.per_gpu for point in of_form], marker=marker, label=form)
    _label(left, sizes, "steps per hour")
    _label(right, sizes, "steps per hour and GPU, % of the best")
    left.legend()
    figure.suptitle(title)
    save_png(figure, output)


def _label(axes: Axes, sizes: Sequence[int], name: str) -> None:
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=name)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    if axes.get_ylim()[1] < 20 * axes.get_ylim()[0]:  # Hardly a power of ten is among the values.
        axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axes.tick_params(axis="x", labelrotation=45)
    axes.grid(visible=True, which="both", alpha=0.3)
