"""`python -m pytest -p tests.te_cpu.plugin PATHS`: tests on the emulated device, here and in processes they start."""

from __future__ import annotations

import collections
import functools
import gc
import os
from typing import Any

import pytest

from tests import te_cpu
from tests.distributed.launching import SHARED

gc.disable()  # As in the conftest.py, until tests have been collected.
if te_cpu.VARIABLE not in os.environ:
    os.environ.pop(SHARED, None)  # It has no emulated device.
os.environ[te_cpu.VARIABLE] = "1"
te_cpu.install()

from tests.te_cpu import extension  # noqa: E402

CALLS: collections.Counter[str] = collections.Counter()


def _counted(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return function(*args, **kwargs)

    return call


for _name, _function in list(vars(extension).items()):
    if callable(_function) and not isinstance(_function, type) and not _name.startswith("_"):
        setattr(extension, _name, _counted(_name, _function))


DEVIATIONS: list[str] = []
"""Rows of a Markdown table that the summary shows."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"device: emulated; Transformer Engine {te_cpu.version()} (its Python files)")
    for row in DEVIATIONS:
        terminalreporter.write_line(row)
    terminalreporter.write_line(f"calls of the emulated extension: {sum(CALLS.values())} {dict(CALLS.most_common(12))}")
