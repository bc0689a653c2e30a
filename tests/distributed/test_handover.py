"""Samples handed over to two replicas of two processes each."""

import json
from pathlib import Path

import pytest

from tests.distributed.launching import run_workers

WORKER = Path(__file__).parent / "workers" / "handover.py"
COMMON = {"seed": 0, "mini_batch_groups": 2, "group_size": 6, "budget": 80}


@pytest.mark.distributed
def test_every_replica_gets_its_samples_with_added_columns_exactly(tmp_path):
    cases = [
        COMMON,
        # Refused on all processes, which then go on to the next case together.
        {**COMMON, "budget": 0},
        # Engines change from token to token, which makes no runs worth their lengths.
        {**COMMON, "seed": 1},
        {**COMMON, "seed": 2, "group_size": 2},
        {**COMMON, "seed": 3, "mini_batch_groups": 4},
    ]
    lines = run_workers(WORKER, 4, [json.dumps(cases)], tmp_path, timeout_s=180).strip().splitlines()
    assert lines[1] == "refused on 4"
    handed_over = [line.split() for line in lines if line.startswith("tokens")]
    assert len(handed_over) == 4
    for _, first, second, _, total in handed_over:
        assert int(first) + int(second) == int(total)
        assert 0 < int(first) < int(total)


@pytest.mark.distributed
def test_a_replica_without_samples_takes_part(tmp_path):
    # Mini-batches of two responses for three replicas.
    cases = [{**COMMON, "mini_batch_groups": 1, "group_size": 2}]
    lines = run_workers(WORKER, 6, [json.dumps(cases)], tmp_path, timeout_s=180).strip().splitlines()
    _, *counts, _, total = lines[0].split()
    assert min(map(int, counts)) == 0
    assert sum(map(int, counts)) == int(total)
