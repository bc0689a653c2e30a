"""Engines that join while rank 0 waits for its work are updated by all processes, which also leave together."""

import asyncio
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.engines.sglang.fleet import SglangFleet
from dapo_mega.errors import FleetError, InputError

from .launching import run_distributed

pytestmark = pytest.mark.distributed

ERRORS = {"none": None, "input": InputError("the disk is full"), "fleet": FleetError("too few engines")}


class JoiningDriver:
    """Engines have joined at the first two looks while the work waits."""

    def __init__(self):
        self.num_joined = 0

    def wait_for_engines(self):
        pass

    def has_outdated(self):
        self.num_joined += 1
        return self.num_joined <= 2

    def run(self, work, meanwhile):
        with closing(work):
            for _ in range(3):
                meanwhile()
            return asyncio.run(work)


def updates_and_ending(error):
    """Rank 0 waits for its work while engines join, the other rank serves."""
    processes = SimpleNamespace(rank=dist.get_rank(), control=dist.group.WORLD)
    fleet = SglangFleet(processes, JoiningDriver() if processes.rank == 0 else None)
    updates = []

    def update():
        total = torch.ones(1)
        dist.all_reduce(total)
        updates.append(float(total))
        if len(updates) == 2 and ERRORS[error]:
            raise ERRORS[error]

    fleet.on_outdated_engines(update)
    try:
        with raise_on_all_ranks(processes.control):
            if processes.rank == 0:
                try:
                    result = fleet.run(asyncio.sleep(0, "done"))
                finally:
                    fleet.end_serving()
                assert result == "done"
            else:
                fleet.serve()
    except (InputError, FleetError) as caught:
        return updates, str(caught)
    return updates, "went on"


@pytest.mark.parametrize(
    ("error", "ending"), [("none", "went on"), ("input", "the disk is full"), ("fleet", "too few engines")]
)
def test_all_processes_update_joining_engines_and_end_alike(error, ending):
    assert run_distributed(updates_and_ending, 2, error, timeout_s=120) == [([2.0, 2.0], ending)] * 2
