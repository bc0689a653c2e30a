"""The results as files: `results.md`, `results.json` and `curves.png`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_mega.ablation.intervals import Estimate
from dapo_mega.ablation.outcomes import Outcome
from dapo_mega.ablation.plan import Plan
from dapo_mega.ablation.results import ArmResult, Records, gather, held_out
from dapo_mega.atomic_files import replace_file
from dapo_mega.metrics.plotting import empty_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = {"ladder": "The ladder (DAPO, Table 1)", "methods": "All methods"}
_REFERENCES = {"ladder": "against the row before", "methods": "against the first row"}
_NOTHING = "-"


def write_results(plan: Plan, outcomes: Mapping[str, Outcome]) -> str:
    """Write the three files into the plan's folder; returns the Markdown. Files are replaced as wholes."""
    results = gather(plan, outcomes)
    text = markdown(results)
    replace_file(plan.output / "results.md", text)
    replace_file(plan.output / "results.json", json.dumps(as_json(plan, results), allow_nan=False) + "\n")
    draw_curves(results, plan.output / "curves.png")
    return text


def markdown(results: Sequence[ArmResult]) -> str:
    """A table per group of arms, what did not finish, and how the numbers were made."""
    parts = []
    for group in dict.fromkeys(result.arm.group for result in results):
        rows = [result for result in results if result.arm.group == group]
        parts.append(f"## {_TITLES[group]}\n\n{_table(rows)}")
    unfinished = []
    for one in (one for result in results for one in result.runs if one.outcome.state != "finished"):
        state = "not begun" if one.outcome.state == "absent" else one.outcome.state
        reason = f": {one.outcome.message}" if one.outcome.message else ""
        unfinished.append(f"- {one.run.arm.title}, seed {one.run.seed}: {state}, step {one.outcome.step}{reason}")
    if unfinished:
        parts.append("## Not finished\n\n" + "\n".join(unfinished))
    lacking = []
    for one in (one for result in results for one in result.finished):
        if ends := [word for word, place in (("first", 0), ("last", -1)) if held_out(one.records, place) is None]:
            lacking.append(
                f"- {one.run.arm.title}, seed {one.run.seed}: no accuracy in the {' and the '.join(ends)} "
                "evaluation; it is in no mean of these"
            )
    if lacking:
        parts.append("## Without a score\n\n" + "\n".join(lacking))
    parts.append(_EXPLANATION)
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[ArmResult]) -> str:
    group = rows[0].arm.group
    has_paper = any(row.arm.paper is not None for row in rows)
    header = ["row", *(["paper"] if has_paper else []), "accuracy before", "after", "gain", _REFERENCES[group]]
    header += ["verdict", "length", "cut off", "entropy", "minutes", "runs"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        paper = [_number(row.arm.paper, ".0f")] if has_paper else []
        estimates = [_estimate(value) for value in (row.before, row.after, row.gain, row.versus_previous)]
        ends = ((row.response_length, ".1f"), (row.cut_off, ".3f"), (row.entropy, ".3f"), (row.minutes, ".1f"))
        numbers = [_number(value, spec) for value, spec in ends]
        cells = [row.arm.title, *paper, *estimates, verdict(row.versus_previous), *numbers]
        cells.append(f"{len(row.finished)}/{len(row.runs)}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(difference: Estimate | None) -> str:
    """What the difference to the reference row shows."""
    if difference is None:
        return _NOTHING
    if difference.excludes_zero is None:
        return "one seed"
    if not difference.excludes_zero:
        return "within noise"
    return "better" if difference.mean > 0 else "worse"


def _estimate(value: Estimate | None) -> str:
    if value is None:
        return _NOTHING
    interval = f" [{value.low:.3f}, {value.high:.3f}]" if value.low is not None else ""
    return f"{value.mean:.3f}{interval}"


def _number(value: float | None, spec: str) -> str:
    return _NOTHING if value is None else format(value, spec)


_EXPLANATION = """\
Accuracy is avg@k on the held-out prompts, before the first and after the last step: the mean over the seeds that \
finished, with the 95 % interval of a percentile bootstrap over the seeds (not over prompts: runs record means), which \
for up to three seeds reaches from the lowest to the highest. Differences pair equal seeds, with Student's 95 % \
interval; "within noise": it holds 0, as it does in 95 % of comparisons of equal rows. All runs share one cold start, \
so the intervals do not cover another one. Length and cut off: tokens of held-out responses, and the share that \
reached the limit, at the end. Entropy: nats per token in the last step. Minutes: sum of the steps' times, evaluations \
included, starts not."""


def as_json(plan: Plan, results: Sequence[ArmResult]) -> dict[str, Any]:
    """Everything that the results are made of. Values that JSON has no number for are null."""
    return {
        "output": str(plan.output),
        "seeds": list(plan.seeds),
        "processes": plan.processes,
        "versions": _versions(results),
        "arms": [_arm_json(result) for result in results],
    }


def _arm_json(result: ArmResult) -> dict[str, Any]:
    estimates = ("before", "after", "gain", "versus_previous")
    return {
        "group": result.arm.group,
        "name": result.arm.name,
        "title": result.arm.title,
        "paper": result.arm.paper,
        **{name: asdict(value) if (value := getattr(result, name)) else None for name in estimates},
        "verdict": verdict(result.versus_previous),
        "response_length": result.response_length,
        "cut_off": result.cut_off,
        "entropy": result.entropy,
        "minutes": result.minutes,
        "runs": [
            {
                "seed": one.run.seed,
                "file": str(one.run.file),
                "overrides": list(one.run.overrides),
                "folder": str(one.run.folder),
                **asdict(one.outcome),
                "curves": _curves(one.records),
            }
            for one in result.runs
        ],
    }


def _curves(records: Records) -> dict[str, list[list[float | None]]]:
    curves: dict[str, list[list[float | None]]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step":
                curves.setdefault(name, []).append([record["step"], value if math.isfinite(value) else None])
    return curves


def _versions(results: Sequence[ArmResult]) -> dict[str, str]:
    """Versions of the packages, as the first run that has begun recorded them."""
    files = [one.run.folder / "versions.json" for result in results for one in result.runs]
    text = next((file.read_text() for file in files if file.is_file()), "{}")
    versions: dict[str, str] = json.loads(text)
    return versions


_PANELS = (
    ("Held-out accuracy", "avg@k", "evaluation/avg_at_k"),
    ("Response length", "mean tokens", "rollout/response_length_mean"),
    ("Generation entropy", "nats per token", "policy/entropy"),
)
_PANEL_TITLES = {"ladder": "Table 1", "methods": "methods"}
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
            axes.set(title=f"{title} ({_PANEL_TITLES[group]})", xlabel="step", ylabel=label)
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


def _draw_panel(axes: "Axes", arms: Sequence[ArmResult], metric: str) -> None:
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
