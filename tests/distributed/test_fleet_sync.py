"""Stages that only rank 0 speaks for: they join engines, their leaders send in turn and hear at once of a failure."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.weight_sync.scripted_engines import ScriptedEngine, ScriptedFleet

from .launching import run_distributed, run_workers
from .workers.fleet_sync import Policy, two_stages_sync

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).parent / "workers" / "fleet_sync.py"
FAULTS = ["none", "refuse", "none", "die", "none"]


def test_every_stage_reaches_all_engines_but_the_one_that_fails(tmp_path):
    lines = run_workers(WORKER, 2, [json.dumps(FAULTS)], tmp_path, timeout_s=200).strip().splitlines()
    others, everyone = ["http://e0", "http://e2"], ["http://e0", "http://e1", "http://e2"]
    for fault, report in zip(FAULTS, map(json.loads, lines), strict=True):
        is_well = fault == "none"
        assert report == {
            "exact": everyone if is_well else others,
            "away": [] if is_well else ["http://e1"],
            "bytes": 4 * 6 * 4,
        }


URLS = ["http://e0", "http://e1", "http://e2"]
JOINING_LIMIT_S = 15.0


class EngineInTurn(ScriptedEngine):
    """It joins the groups of both stages once its predecessor is in those of its own."""

    predecessor = None

    async def init_weights_update_group(self, **group):
        while self.predecessor and len(self.predecessor.groups) < 2:
            await asyncio.sleep(0.005)
        await super().init_weights_update_group(**group)


def outcomes_of_joining(*turns):
    """New engines for each update, which join in these turns; then an update without the first engine. What each
    update came to, on rank 0: which engines have its weights, and which are away for what reason."""
    rank = dist.get_rank()
    fleet = ScriptedFleet(len(URLS), JOINING_LIMIT_S) if rank == 0 else None
    sync = two_stages_sync(fleet, JOINING_LIMIT_S)

    def outcome_of(update, version):
        policy = Policy(rank, version)
        update(policy, version)
        return fleet and ([url for url in URLS if policy.is_held_by(fleet.engines[url])], dict(fleet.away))

    outcomes = []
    for version, urls in enumerate(turns, start=1):
        if fleet:
            fleet.return_all()
            fleet.engines = {url: EngineInTurn(url, JOINING_LIMIT_S) for url in URLS}
            fleet.outdated = set(URLS)
            for before, after in pairwise(urls):
                fleet.engines[after].predecessor = fleet.engines[before]
        outcomes.append(outcome_of(sync.push_to_outdated, version))
    if fleet:
        fleet.return_all()
        fleet.failed(URLS[0], "scripted")
        for engine in fleet.engines.values():
            engine.predecessor = None
    outcomes.append(outcome_of(sync.push, len(turns) + 1))
    return outcomes


def test_engines_that_join_at_once_meet_all_stages_in_whatever_order():
    """Each stage waits for all of them at a time, and what it calls an engine's group is with that engine."""
    outcomes, _ = run_distributed(outcomes_of_joining, 2, URLS, URLS[::-1], timeout_s=120)
    assert outcomes == [(URLS, {}), (URLS, {}), (URLS[1:], {URLS[0]: "scripted"})]
