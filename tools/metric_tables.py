"""The tables of metrics in `dapo_mega/metrics/README.md`, made from `dapo_mega/metrics/catalogue.py`.

python tools/metric_tables.py           # writes them
python tools/metric_tables.py --check   # says whether they are what the catalogue says, by its exit status
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dapo_mega.metrics.catalogue import CATALOGUE, PREFIXES, Metric

PAGE = Path(__file__).resolve().parents[1] / "dapo_mega" / "metrics" / "README.md"
BEGIN, END = "<!-- metrics: tools/metric_tables.py -->", "<!-- end of the metrics -->"
_HEAD = "| metric | unit | meaning | healthy | warning sign → what to do |\n|---|---|---|---|---|"


def metric_tables() -> str:
    """One section with a table per prefix, in the catalogue's order. Raises ValueError for a metric whose prefix has no
    description."""
    if unknown := {metric.prefix for metric in CATALOGUE} - PREFIXES.keys():
        raise ValueError(f"{sorted(unknown)} have no description in PREFIXES of dapo_mega/metrics/catalogue.py")
    return "\n\n".join(_section(prefix, about) for prefix, about in PREFIXES.items())


def _section(prefix: str, about: str) -> str:
    metrics = [metric for metric in CATALOGUE if metric.prefix == prefix]
    rows = "\n".join(_row(metric) for metric in metrics)
    members = "".join(_members(metric) for metric in metrics if metric.members)
    return f"### {prefix}/\n\n{about}\n\n{_HEAD}\n{rows}{members}"


def _row(metric: Metric) -> str:
    advice = metric.warning + (f" → {metric.action}" if metric.action else "")
    name = f"`{metric.name.partition('/')[2]}`"
    cells = (name, metric.unit, metric.meaning, metric.healthy or "no general value", advice or "–")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _members(metric: Metric) -> str:
    lines = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in metric.members.items())
    return f"\n\n| `{metric.name}` | when |\n|---|---|\n{lines}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = PAGE.read_text()
    head, _, rest = before.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        sys.exit(f"error: {PAGE} has no lines '{BEGIN}' and '{END}'")
    after = f"{head}{BEGIN}\n\n{metric_tables()}\n\n{END}{tail}"
    if arguments.check:
        sys.exit(0 if after == before else f"error: the tables in {PAGE} are outdated; run python {sys.argv[0]}")
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
