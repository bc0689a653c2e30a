"""Where a trainer's process computes and listens, and what its groups carry."""

import psutil
import torch
import torch.distributed as dist

from dapo_mega.config import ParallelConfig
from dapo_mega.megatron import processes


def test_a_single_process_listens_on_this_machine_only(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    before = set(listening())
    processes._join_process_group(torch.device("cpu"))
    try:
        assert dist.get_world_size() == 1
        dist.barrier()
        addresses = {ip for ip, _ in set(listening()) - before}
    finally:
        dist.destroy_process_group()
    assert addresses == {"127.0.0.1"}


def test_each_process_has_a_gpu_and_groups_for_data_of_the_host(monkeypatch):
    """NCCL refuses tensors of the host."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    chosen, backends, new_group = [], {}, dist.new_group

    def noted(*arguments, **options):
        group = new_group(*arguments, **options)
        backends[group] = options.get("backend")
        return group

    monkeypatch.setattr(processes.accelerator, "select", chosen.append)
    monkeypatch.setattr(dist, "new_group", noted)
    try:
        mine = processes.start_processes(ParallelConfig(), 0)
        assert chosen == [3]
        assert [backends.get(group) for group in (mine.control, mine.leaders, mine.replica)] == ["gloo"] * 3
    finally:
        processes.stop_processes()


def listening():
    connections = psutil.Process().net_connections(kind="inet")
    return [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
