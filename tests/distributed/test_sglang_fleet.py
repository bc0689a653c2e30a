"""Engines that join while rank 0 waits for answers are updated by all processes, which also leave together."""

from ast import literal_eval
from pathlib import Path

import pytest

from tests.distributed.launching import run_workers

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "sglang_fleet.py"


@pytest.mark.parametrize(
    ("error", "ending"), [("none", "went on"), ("input", "the disk is full"), ("fleet", "too few engines")]
)
def test_all_processes_update_joining_engines_and_end_alike(tmp_path, error, ending):
    printed = run_workers(WORKER, 2, [error], tmp_path, timeout_s=120)
    assert literal_eval(printed.strip().splitlines()[-1]) == [([2.0, 2.0], ending)] * 2
