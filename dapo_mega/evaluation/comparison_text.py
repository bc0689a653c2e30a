"""A comparison in words and tables, and as JSON values."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from dapo_mega.evaluation.comparison import AgainstBase, BenchmarkComparison, ChangedProblem, Crossing, in_words
from dapo_mega.evaluation.statistics import Estimate

_MAX_LISTED: Final = 5
_MAX_PROMPT: Final = 60


def as_text(comparison: BenchmarkComparison) -> str:
    """What the command prints of one benchmark."""
    counts = [f"{label} {in_words(*range_)}" for label, range_ in comparison.num_samples.items()]
    parts = [f"{comparison.name}: {comparison.num_problems} problems; responses to each: {', '.join(counts)}"]
    for label, against in comparison.against_base.items():
        parts.append(_differences(comparison, label, against))
        parts.append("\n".join(_findings(comparison, label, against)))
    parts.append(_difficulty(comparison))
    if comparison.notes:
        parts.append("\n".join(f"note: {note}" for note in comparison.notes))
    return "\n\n".join(parts)


def as_values(comparison: BenchmarkComparison) -> dict[str, Any]:
    """Everything as JSON values, the findings in words among them."""
    values = asdict(comparison)
    for label, against in comparison.against_base.items():
        values["against_base"][label]["findings"] = list(_findings(comparison, label, against))
    return {"base": comparison.base, **values}


def _crossing(comparison: BenchmarkComparison, label: str, crossing: Crossing) -> str:
    first, second = (comparison.base, label) if crossing.behind_before == "model" else (label, comparison.base)
    differences = comparison.against_base[label].differences
    told = f"{label} and {comparison.base} cross at k = {crossing.k}: below {first} is ahead, from there on {second}."
    sides = []
    for side, at in (("below", crossing.last_before), ("from there on", crossing.first_after)):
        if at is None:
            sides.append(f"{side} no interval of the difference excludes 0")
        else:
            sides.append(f"at k = {at} the difference is {_shown(differences[f'pass@{at}'].mean)}")
    verdict = (
        "the intervals separate on both sides, so the crossing is more than noise"
        if crossing.is_separated
        else "the intervals do not separate on both sides, so these responses do not show that the curves really cross"
    )
    return f"{told} {'; '.join(sides).capitalize()}: {verdict}."


def _differences(comparison: BenchmarkComparison, label: str, against: AgainstBase) -> str:
    rows = [["", comparison.base, label, "difference", "p", "won", "lost"]]
    for name, difference in against.differences.items():
        if name == "pass@1":  # The same as avg@k.
            continue
        base, model = comparison.measures[comparison.base][name], comparison.measures[label][name]
        p = "< 0.001" if difference.p_value < 0.001 else f"{difference.p_value:.3f}"
        counts = [str(difference.won), str(difference.lost)]
        rows.append([name, _shown(base, ""), _shown(model, ""), _shown(difference.mean), p, *counts])
    return _table(rows)


def _findings(comparison: BenchmarkComparison, label: str, against: AgainstBase) -> Iterator[str]:
    base, largest = comparison.base, comparison.ks[-1]
    for crossing in against.crossings:
        yield _crossing(comparison, label, crossing)
    if not against.crossings:
        yield _without_crossing(comparison, label)
    yield (
        f"Sampling-efficiency gap, pass@{largest} of {base} minus pass@1 of {label}: {_shown(against.sampling_gap)}."
    )
    yield from _listed(f"{label} solves {{}} that {base} never does", against.newly_solved, label, comparison)
    yield from _listed(f"{base} solves {{}} that {label} never does", against.no_longer_solved, label, comparison)


def _without_crossing(comparison: BenchmarkComparison, label: str) -> str:
    differences, largest = comparison.against_base[label].differences, comparison.ks[-1]
    means = {k: differences[f"pass@{k}"].mean for k in comparison.ks}
    apart = [k for k, mean in means.items() if abs(mean.value) > 1e-9]
    if not apart:
        return f"No crossing: {label} and {comparison.base} are equal up to k = {largest}."
    higher = label if means[apart[0]].value > 0 else comparison.base
    end = f"there the difference is {_shown(means[largest])}" if apart[-1] == largest else "beyond both are equal"
    if any(mean.low > 0 or mean.high < 0 for mean in means.values()):
        return f"No crossing up to k = {largest}: {higher} is ahead up to k = {apart[-1]}, {end}."
    return (
        f"No crossing up to k = {largest}: {higher} is higher up to k = {apart[-1]}, {end}; but no interval of the "
        f"difference excludes 0, so these responses do not show which is better."
    )


def _listed(
    sentence: str, problems: Sequence[ChangedProblem], label: str, comparison: BenchmarkComparison
) -> Iterator[str]:
    """Prompts are shown without a long instruction that all of them begin with."""
    base, start = comparison.base, comparison.shared_start
    start = start[: max(map(start.rfind, " \n")) + 1] if len(start) > _MAX_PROMPT // 2 else ""
    count = f"{len(problems) or 'no'} problem{'' if len(problems) < 2 else 's'}"
    yield sentence.format(count) + (":" if problems else ".")
    for problem in problems[:_MAX_LISTED]:
        prompt = " ".join(problem.prompt.removeprefix(start).split())
        shown = prompt if len(prompt) <= _MAX_PROMPT else f"{prompt[:_MAX_PROMPT]}..."
        yield (
            f"  problem {problem.index} ({label} {problem.model_correct} of {problem.model_samples}, {base} "
            f"{problem.base_correct} of {problem.base_samples}): {shown}"
        )
    if len(problems) > _MAX_LISTED:
        yield f"  and {len(problems) - _MAX_LISTED} more"


def _difficulty(comparison: BenchmarkComparison) -> str:
    labels, largest = list(comparison.measures), comparison.ks[-1]
    columns = [f"{name} {label}" for name in (f"pass@{largest}", "pass@1") for label in labels]
    rows = [[f"responses of {comparison.base} that are right", "problems", *columns]]
    for group in comparison.difficulty:
        shares = [f"{found[label]:.3f}" for found in (group.solved, group.success_rate) for label in labels]
        rows.append([group.name, str(group.num_problems), *shares])
    return _table(rows)


def _shown(estimate: Estimate, sign: str = "+") -> str:
    """Without an interval where all problems have the same value: they show no spread."""
    form = f"{sign}.{1 if abs(estimate.value) >= 10 else 3}f"
    interval = f" [{estimate.low:{form}}, {estimate.high:{form}}]" if estimate.low < estimate.high else ""
    return f"{estimate.value:{form}}{interval}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell, all but the first aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
