"""Plots the curves to watch a run by, as one PNG."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.metrics import figures
from dapo_mega.metrics.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Records = Sequence[Mapping[str, float]]

_LINE_STYLES = ("-", "--", ":")
_COLUMNS = 3
_NOT_FINITE_COLOR = "crimson"
_NOT_FINITE_LABEL = "not finite"


def plot_run(run_dirs: Sequence[Path], output: Path) -> None:
    """Draw the curves of one run, or of several over one another, into the PNG file `output`.

    With one run the colours tell its curves apart; with several, the colours are the runs. Steps whose
    value is NaN or infinite get a red cross at the foot of the panel. There is a panel for what any of the runs has.
    `output` is replaced as a whole or not touched. Raises ValueError, in one line, for runs without metrics, a run
    given twice, and a bad output.
    """
    runs = _load_runs(run_dirs)
    if output.suffix.lower() != ".png":
        raise ValueError(f"output {output} must end in .png")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"the folder of the output {output} does not exist")
    save_png(_draw(runs), output)


def save_png(figure: "Figure", output: Path) -> None:
    """Write the figure to the file `output`, which is replaced as a whole or not touched."""
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _load_runs(run_dirs: Sequence[Path]) -> dict[str, Records]:
    if not run_dirs:
        raise ValueError("no run to plot")
    if len({run_dir.resolve() for run_dir in run_dirs}) < len(run_dirs):
        raise ValueError("a run is given twice; give each once")
    folder_names = [run_dir.absolute().name for run_dir in run_dirs]
    labels = folder_names if len(set(folder_names)) == len(run_dirs) else [str(path) for path in run_dirs]
    return {label: _load(run_dir) for label, run_dir in zip(labels, run_dirs, strict=True)}


def _load(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    if not run_dir.is_dir():
        raise ValueError(f"run folder {run_dir} does not exist")
    if not path.is_file():
        raise ValueError(f"run folder {run_dir} holds no metrics.jsonl")
    records = read_metrics(path)
    if not records:
        raise ValueError(f"{path} holds no complete step yet")
    if not figures.figures_of(_names(records)):
        raise ValueError(f"{path} holds none of the metrics that are drawn, such as rollout/reward_mean")
    return records


def _names(records: Iterable[Mapping[str, float]]) -> dict[str, None]:
    return dict.fromkeys(name for record in records for name in record)


def empty_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches that can be drawn without a display."""
    # Imported here: training does not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(runs: Mapping[str, Records]) -> "Figure":
    panels = figures.figures_of(_names(record for records in runs.values() for record in records))
    num_rows = -(-len(panels) // _COLUMNS)
    figure = empty_figure(15, 4 * num_rows)
    for number, panel in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(num_rows, _COLUMNS, number), panel, list(runs.values()))
    title = f"Run {next(iter(runs))}" if len(runs) == 1 else f"{len(runs)} runs"
    # parse_math=False: a dollar sign in a folder's name is no formula.
    figure.suptitle(title, parse_math=False)
    if len(runs) > 1:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], color=f"C{index % 10}", linewidth=2) for index in range(len(runs))]
        legend = figure.legend(handles, list(runs), loc="outside lower center", ncols=min(len(runs), 4))
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def _draw_panel(axes: "Axes", panel: figures.Figure, runs: Sequence[Records]) -> None:
    axes.set_title(panel.title, parse_math=False)
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    for run_index, records in enumerate(runs):
        for curve_index, curve in enumerate(panel.curves):
            color_index = curve_index if len(runs) == 1 else run_index
            _draw_curve(axes, curve, records, f"C{color_index % 10}", _LINE_STYLES[curve_index])
    if len(panel.curves) > 1 or _NOT_FINITE_LABEL in axes.get_legend_handles_labels()[1]:
        # One entry per curve, also where several runs have it: the runs are in the figure's legend.
        handles, labels = axes.get_legend_handles_labels()
        by_label = dict(zip(reversed(labels), reversed(handles), strict=True))
        unique = list(dict.fromkeys(labels))
        axes.legend([by_label[label] for label in unique], unique, fontsize="small")


def _draw_curve(axes: "Axes", curve: figures.Curve, records: Records, color: str, line_style: str) -> None:
    points = [(record["step"], record[curve.metric]) for record in records if curve.metric in record]
    if not points:
        return
    # A point between two gaps has no line to be seen by, so short and sparse curves get markers.
    marker = "o" if curve.metric.startswith("evaluation/") else "." if len(points) <= 30 else None
    steps = [step for step, _ in points]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    axes.plot(steps, values, line_style, color=color, marker=marker, markersize=5, label=curve.label)
    bad_steps = [step for step, value in points if not math.isfinite(value)]
    if bad_steps:
        axes.plot(
            bad_steps,
            [0.02] * len(bad_steps),
            "x",
            color=_NOT_FINITE_COLOR,
            transform=axes.get_xaxis_transform(),
            label=_NOT_FINITE_LABEL,
        )


_ROWS = (
    ("held-out reward", "evaluation/reward_mean", ".3f"),
    ("held-out accuracy (avg@k)", "evaluation/avg_at_k", ".3f"),
    ("held-out pass@k", "evaluation/pass_at_k", ".3f"),
    ("held-out response length", "evaluation/response_length_mean", ".1f"),
    ("reward", "rollout/reward_mean", ".3f"),
    ("loss", "policy/loss", ".4f"),
    ("generation entropy (nats per token)", "policy/entropy", ".4f"),
    ("mean probability of generated tokens", "rollout/mean_token_probability", ".4f"),
)


def before_and_after(run_dir: Path) -> list[str]:
    """`quantity  first -> last` for every quantity that the run recorded, with the steps they are from."""
    records = read_metrics(run_dir / "metrics.jsonl")
    lines = []
    is_rl = any("rollout/reward_mean" in record for record in records)  # Where the loss's value says nothing.
    for label, name, spec in _ROWS:
        if is_rl and name == "policy/loss":
            continue
        found = [(int(record["step"]), record[name]) for record in records if name in record]
        if found:
            (first_step, first), (last_step, last) = found[0], found[-1]
            lines.append(f"{label:38s} {first:{spec}} -> {last:{spec}}   (steps {first_step} -> {last_step})")
    return lines
