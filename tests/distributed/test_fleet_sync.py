"""Stages that only rank 0 speaks for: their leaders send in turn, and hear of an engine's failure at once."""

import json
from pathlib import Path

import pytest

from .launching import run_workers

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "workers" / "fleet_sync.py"
FAULTS = ["none", "refuse", "none", "die", "none"]


def test_every_stage_reaches_all_engines_but_the_one_that_fails_and_that_one_when_it_is_back(tmp_path):
    lines = run_workers(WORKER, 2, [json.dumps(FAULTS)], tmp_path, timeout_s=200).strip().splitlines()
    others, everyone = ["http://e0", "http://e2"], ["http://e0", "http://e1", "http://e2"]
    for fault, report in zip(FAULTS, map(json.loads, lines), strict=True):
        is_well = fault == "none"
        assert report == {
            "exact": everyone if is_well else others,
            "away": [] if is_well else ["http://e1"],
            "bytes": 4 * 6 * 4,
        }
