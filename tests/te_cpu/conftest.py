"""Tests that need the emulated device are collected where it is installed: in the processes that test_suite starts."""

import pytest

from tests import te_cpu

collect_ignore = [] if te_cpu.is_installed() else ["emulated"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-table", action="store_true", help="also the layouts and models that the gate leaves out: 10 minutes"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("whole_table", False):
        chosen = [item for item in items if not item.get_closest_marker("whole_table")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
