"""Draws a timeline: a lane for the trainer's stages, the weights and everything else, and one for each engine."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dapo_mega.metrics.plotting import empty_figure
from dapo_mega.metrics.timeline.excerpt import Excerpt
from dapo_mega.metrics.timeline.records import Load, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ENGINES = 32
"""More engines than these are drawn as one lane with their sum."""

_STAGES = ("rollout", "pack", "score", "update", "samples", "weight_sync", "evaluation", "checkpoint")
_HEIGHT = 0.8


def timeline_figure(excerpt: Excerpt, title: str) -> "Figure":
    """The picture, with seconds since the excerpt's start from left to right and the lanes' names at the left. Dashed
    lines separate the steps. How many requests an engine has open is its shade."""
    engines = excerpt.engines
    if len(engines) > MAX_ENGINES:
        engines = {f"all {len(engines)} engines": summed(engines)}
    trainer = {"trainer": excerpt.spans.get("trainer", ())}
    others = {lane: spans for lane, spans in excerpt.spans.items() if lane != "trainer"}
    lanes = [*trainer, "scoring", *others, *engines]
    figure = empty_figure(15, 2 + 0.35 * len(lanes))
    axes = figure.subplots()
    _draw_stages(axes, trainer["trainer"], excerpt.start)
    _draw_loads(axes, {lanes.index("scoring"): excerpt.scoring}, excerpt.start, "Greens", "responses being scored")
    for lane, spans in others.items():
        _draw_bars(axes, lanes.index(lane), spans, excerpt.start, "slategrey")
    by_row = {lanes.index(name): loads for name, loads in engines.items()}
    _draw_loads(axes, by_row, excerpt.start, "Blues", "open requests")
    for step in excerpt.steps:
        axes.axvline(step.end - excerpt.start, color="black", linestyle="--", linewidth=0.8)
        middle = (max(step.start, excerpt.start) + min(step.end, excerpt.end)) / 2 - excerpt.start
        axes.text(middle, 1.01, step.name, ha="center", va="bottom", transform=axes.get_xaxis_transform())
    axes.set_yticks(range(len(lanes)), lanes, parse_math=False)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, excerpt.end - excerpt.start)
    axes.set_xlabel("s")
    figure.suptitle(title, parse_math=False)
    return figure


def summed(engines: Mapping[str, Sequence[Load]]) -> list[Load]:
    """The open requests of all engines together."""
    changes: dict[float, float] = {}
    for load in (load for loads in engines.values() for load in loads):
        changes[load.start] = changes.get(load.start, 0.0) + load.mean
        changes[load.end] = changes.get(load.end, 0.0) - load.mean
    times = sorted(changes)
    found, total = [], 0.0
    for start, end in pairwise(times):
        total += changes[start]
        found.append(Load(start, end, max(total, 0.0)))
    return found


def _draw_stages(axes: "Axes", spans: Sequence[Span], start: float) -> None:
    names = [name for name in _STAGES if any(span.name == name for span in spans)]
    names += sorted({span.name for span in spans} - set(names))
    for name in names:
        stage = [span for span in spans if span.name == name]
        color = f"C{_STAGES.index(name) if name in _STAGES else 9}"
        _draw_bars(axes, 0, stage, start, color, label=name)
    if names:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")


def _draw_bars(
    axes: "Axes", row: int, spans: Sequence[Span], start: float, color: str, label: str | None = None
) -> None:
    bars = [(span.start - start, span.end - span.start) for span in spans]
    axes.broken_barh(
        bars, (row - _HEIGHT / 2, _HEIGHT), facecolors=color, edgecolor="white", linewidth=0.3, label=label
    )


def _draw_loads(axes: "Axes", rows: Mapping[int, Sequence[Load]], start: float, color_map: str, label: str) -> None:
    """One lane for each row, all with one scale of shades."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    most = max((load.mean for loads in rows.values() for load in loads), default=0.0)
    shades = ScalarMappable(Normalize(0.0, max(most, 1.0)), color_map)
    for row, loads in rows.items():
        busy = [load for load in loads if load.mean]
        bars = [(load.start - start, load.end - load.start) for load in busy]
        colors = shades.to_rgba(np.array([load.mean for load in busy]))
        axes.broken_barh(bars, (row - _HEIGHT / 2, _HEIGHT), facecolors=colors)
    if rows:
        axes.figure.colorbar(shades, ax=axes, label=label, shrink=0.8, pad=0.01)
