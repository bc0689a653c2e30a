"""Draws comparisons: pass@k against k with crossings marked, and the share solved by difficulty, as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.errors import InputError
from dapo_mega.evaluation.comparison import BenchmarkComparison
from dapo_mega.metrics.plotting import empty_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CROSSING_COLOR = "crimson"


def draw_comparisons(comparisons: Sequence[BenchmarkComparison], output: Path) -> None:
    """Write the picture to the PNG file `output`: one row of two panels per benchmark."""
    if output.suffix.lower() != ".png":
        raise InputError(f"picture {output} must end in .png")
    figure = empty_figure(13, 4.8 * len(comparisons))
    panels = figure.subplots(len(comparisons), 2, squeeze=False)
    for (curves, bars), comparison in zip(panels, comparisons, strict=True):
        _draw_curves(curves, comparison)
        _draw_difficulty(bars, comparison)
    save_png(figure, output)


def _draw_curves(axes: "Axes", comparison: BenchmarkComparison) -> None:
    """Both axes are logarithmic; a pass@k of 0 has no place on them and is left out, unless all of them are 0."""
    ks = comparison.ks
    for number, (label, measures) in enumerate(comparison.measures.items()):
        found = [measures[f"pass@{k}"] for k in ks]
        values = [estimate.value for estimate in found]
        color = f"C{number % 10}"
        axes.plot(ks, values, "-o", color=color, markersize=4, label=f"{label} (base)" if number == 0 else label)
        axes.fill_between(ks, [e.low for e in found], [e.high for e in found], color=color, alpha=0.2, linewidth=0)
    for label, against in comparison.against_base.items():
        for crossing in against.crossings:
            told = "" if crossing.is_separated else ", within noise"
            axes.axvline(
                crossing.k,
                color=_CROSSING_COLOR,
                linestyle="-" if crossing.is_separated else ":",
                label=f"{label} crosses {comparison.base} at k = {crossing.k}{told}",
            )
    axes.set_xscale("log", base=2)
    if any(measures[f"pass@{k}"].value > 0 for measures in comparison.measures.values() for k in ks):
        axes.set_yscale("log", nonpositive="mask")
    _label_ticks(axes, comparison)
    axes.set_title(f"{comparison.name}: {comparison.num_problems} problems", parse_math=False)
    axes.set_xlabel("k: responses per problem")
    axes.set_ylabel("pass@k, with 95 % intervals over problems")
    axes.grid(alpha=0.3, which="both")
    for text in axes.legend(loc="lower right").get_texts():
        text.set_parse_math(False)


def _label_ticks(axes: "Axes", comparison: BenchmarkComparison) -> None:
    """Numbers as people write them, at the k that were measured and at round shares."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    axes.xaxis.set_major_locator(FixedLocator(list(comparison.ks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    shares = [digit * 10.0**power for power in range(-6, 0) for digit in (1, 2, 5)] + [1.0]
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator([share for share in shares if low <= share <= max(high, 1.0)]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_difficulty(axes: "Axes", comparison: BenchmarkComparison) -> None:
    labels, largest = list(comparison.measures), comparison.ks[-1]
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        places = [i + (number - (len(labels) - 1) / 2) * width for i in range(len(comparison.difficulty))]
        heights = [group.solved[label] for group in comparison.difficulty]
        axes.bar(places, heights, width, color=f"C{number % 10}", label=label)
    names = [f"{group.name}\n({group.num_problems})" for group in comparison.difficulty]
    axes.set_xticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(0, 1.05)
    axes.set_title("Coverage by difficulty")
    axes.set_xlabel(f"share of responses of {comparison.base} that are right (number of problems)", parse_math=False)
    axes.set_ylabel(f"pass@{largest}")
    axes.grid(alpha=0.3, axis="y")
