"""Every metric of a run, read from `tables.md`: unit, meaning, healthy values, warning signs and what to do."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from dapo_mega.declared import Better, Metric

METRIC_COLUMNS = ("metric", "unit", "better", "meaning", "healthy", "warning sign", "what to do")
_BETTER: Mapping[str, Better] = {"higher": "higher", "lower": "lower", "–": ""}
_PAGE = Path(__file__).with_name("tables.md")
_SECTIONS = _PAGE.read_text(encoding="utf-8").split("\n### ")[1:]

METRIC_TABLES: str = "\n".join(f"### {section}" for section in _SECTIONS)
"""The sections of the page: for each prefix what its metrics have in common, and a table of them."""
PREFIXES: Mapping[str, str] = {
    title.removesuffix("/"): about for title, about, *_ in (section.split("\n\n") for section in _SECTIONS)
}
"""What the metrics of each prefix have in common, in the order of the page."""


def _cells(table: str) -> Iterator[list[str]]:
    for line in table.splitlines()[2:]:
        yield [cell.replace("\\|", "|") for cell in line[2:-2].split(" | ")]


def _metrics(prefix: str, tables: list[str]) -> Iterator[Metric]:
    """The metrics of one section. The table behind those of metrics says what a family's members are."""
    members = {table.split("`")[1]: dict(_cells(table)) for table in tables if table.startswith("| `")}
    for table in tables:
        for row in _cells(table) if table.startswith("| metric ") else ():
            if len(row) != len(METRIC_COLUMNS) or row[2] not in _BETTER:
                raise ValueError(f"{_PAGE}: the row of {row[0]} does not have the columns {', '.join(METRIC_COLUMNS)}")
            quoted, unit, better, *about = row
            name = f"{prefix}/{quoted.split('`')[1]}"
            of_family = {member.strip("`"): meaning for member, meaning in members.get(name, {}).items()}
            meaning, healthy, warning, action = ("" if text == "–" else text for text in about)
            yield Metric(name, unit, meaning, healthy, warning, action, of_family, _BETTER[better])


CATALOGUE: tuple[Metric, ...] = tuple(
    metric
    for prefix, section in zip(PREFIXES, _SECTIONS, strict=True)
    for metric in _metrics(prefix, section.split("\n\n"))
)
"""All metrics, in the order of the page."""


def describe(name: str) -> Metric | None:
    """The entry of a recorded metric; None if there is none."""
    return next((metric for metric in CATALOGUE if metric.describes(name)), None)
