"""The catalogue as Markdown, for the page of metrics and for TensorBoard."""

from dapo_mega.metrics.catalogue import CATALOGUE, PREFIXES, Metric

_COLUMNS = ("metric", "unit", "better", "meaning", "healthy", "warning sign", "what to do")


def metric_tables() -> str:
    """One section with a table per prefix, in the catalogue's order. Raises ValueError for a metric whose prefix has no
    description."""
    if unknown := {metric.prefix for metric in CATALOGUE} - PREFIXES.keys():
        raise ValueError(f"{sorted(unknown)} have no description in PREFIXES of dapo_mega.metrics.catalogue")
    return "\n\n".join(_section(prefix, about) for prefix, about in PREFIXES.items())


def _section(prefix: str, about: str) -> str:
    metrics = [metric for metric in CATALOGUE if metric.prefix == prefix]
    lines = [_COLUMNS, ["---"] * len(_COLUMNS), *(_row(metric) for metric in metrics)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    members = "".join(_members(metric) for metric in metrics if metric.members)
    return f"### {prefix}/\n\n{about}\n\n{table}{members}"


def _row(metric: Metric) -> list[str]:
    name = f"`{metric.name.partition('/')[2]}`" + (" (histogram)" if metric.is_histogram else "")
    cells = (
        name,
        metric.unit,
        metric.better or "–",
        metric.meaning,
        metric.healthy or "no general value",
        metric.warning or "–",
        metric.action or "–",
    )
    return [cell.replace("|", "\\|") for cell in cells]


def _members(metric: Metric) -> str:
    lines = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in metric.members.items())
    return f"\n\n| `{metric.name}` | when |\n|---|---|\n{lines}"
