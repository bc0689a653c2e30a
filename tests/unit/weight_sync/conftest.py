"""A trainer of one process and three scripted engines.

What they need is imported where it is used: pytest reads this file before the one above, which prepares Megatron."""

import pytest


@pytest.fixture(scope="module")
def processes():
    import torch
    import torch.distributed as dist

    from dapo_mega.distributed.processes import Processes

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    sizes = {"world_size": 1, "data_size": 1, "tensor_size": 1, "pipeline_size": 1, "context_size": 1, "expert_size": 1}
    ranks = dict.fromkeys(("rank", "data_rank", "tensor_rank", "pipeline_rank", "context_rank", "expert_rank"), 0)
    yield Processes(**sizes, **ranks, device=torch.device("cpu"), control=group, leaders=group, replica=group)
    dist.destroy_process_group()


@pytest.fixture
def fleet():
    from .made_weights import TIMEOUT_S
    from .scripted_engines import ScriptedFleet

    fleet = ScriptedFleet(3, TIMEOUT_S)
    yield fleet
    fleet.close()


@pytest.fixture
def sync(processes, fleet):
    sync = _pushing(processes, fleet)
    yield sync
    fleet.disconnect()
    sync.close()


def _pushing(processes, fleet, settings=None, of_sender=None):
    from dapo_mega.config import WeightSyncConfig
    from dapo_mega.weight_sync.broadcast import BroadcastSender

    from .made_weights import TIMEOUT_S
    from .pushing import Pushing

    config = WeightSyncConfig(timeout_s=TIMEOUT_S, **(settings or {}))
    return Pushing(processes, fleet, config, BroadcastSender(processes, config, **(of_sender or {})))


@pytest.fixture
def one_by_one(monkeypatch):
    """Every tensor is a chunk."""
    monkeypatch.setattr("dapo_mega.weight_sync.encodings._CHUNK_BYTES", 1)


@pytest.fixture
def delta_sync(processes, fleet):
    sync = _pushing(processes, fleet, {"full_every": 3}, {"dtype": "bf16"})
    fleet.without_plugin = set()
    yield sync
    fleet.disconnect()
    sync.close()
