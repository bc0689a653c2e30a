"""Tables of cases, {number of processes: {name: case}}, of which the gate runs a part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Table = Mapping[int, Mapping[str, Any]]


def run_now(table: Table, whole_table: Collection[str], config: pytest.Config) -> dict[int, dict[str, Any]]:
    """The cases that this run makes: those of `whole_table` only with --whole-table."""
    left_out = () if config.getoption("whole_table") else whole_table
    kept = {size: {name: case for name, case in cases.items() if name not in left_out} for size, cases in table.items()}
    return {size: cases for size, cases in kept.items() if cases}


def every_third(items: Iterable[T], config: pytest.Config) -> list[T]:
    """All of them with --whole-table; else every third, from the first on."""
    return list(items)[:: 1 if config.getoption("whole_table") else 3]


def marked(names: Iterable[str], whole_table: Collection[str]) -> list[Any]:
    """The names as parameters of a test, those of `whole_table` with its mark."""
    return [pytest.param(name, marks=pytest.mark.whole_table) if name in whole_table else name for name in names]
