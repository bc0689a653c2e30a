"""All groups of a process share one gloo device, of which each is a port and a thread that polls."""

import psutil
import pytest
import torch
import torch.distributed as dist

from dapo_mega.config import ParallelConfig
from dapo_mega.megatron.processes import start_processes

from .launching import run_distributed

pytestmark = pytest.mark.distributed


def ports_and_sums():
    """The ports that this process listens on with Megatron's groups, those with three more, and what these sum up."""

    def ports():
        return sorted(c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN)

    processes = start_processes(ParallelConfig(tensor=2), 0)
    before = ports()
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    sums = []
    for group in groups:
        ranks = torch.tensor([float(processes.rank)])
        dist.all_reduce(ranks, group=group)
        sums.append(float(ranks))
    return before, ports(), sums


def test_more_groups_open_no_more_ports():
    for before, after, sums in run_distributed(ports_and_sums, 2):
        assert after == before
        assert 1 <= len(before) <= 3, "the device, that of the group from before, and on one process the store"
        assert sums == [1.0] * 3
