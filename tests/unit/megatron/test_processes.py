"""Nothing of a trainer listens where only this machine has to reach it."""

import psutil
import torch
import torch.distributed as dist

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


def listening():
    connections = psutil.Process().net_connections(kind="inet")
    return [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
