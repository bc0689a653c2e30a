"""A trainer of one process and three scripted engines."""

import pytest
import torch
import torch.distributed as dist

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.weight_sync.broadcast import BroadcastSender

from .made_weights import TIMEOUT_S
from .pushing import Pushing
from .scripted_engines import ScriptedFleet


@pytest.fixture(scope="module")
def processes():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    sizes = {"world_size": 1, "data_size": 1, "tensor_size": 1, "pipeline_size": 1, "context_size": 1, "expert_size": 1}
    ranks = dict.fromkeys(("rank", "data_rank", "tensor_rank", "pipeline_rank", "context_rank", "expert_rank"), 0)
    yield Processes(**sizes, **ranks, device=torch.device("cpu"), control=group, leaders=group, replica=group)
    dist.destroy_process_group()


@pytest.fixture
def fleet():
    fleet = ScriptedFleet(3, TIMEOUT_S)
    yield fleet
    fleet.close()


@pytest.fixture
def sync(processes, fleet):
    config = WeightSyncConfig(timeout_s=TIMEOUT_S)
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config))
    yield sync
    fleet.disconnect()
    sync.close()


@pytest.fixture
def one_by_one(monkeypatch):
    """Every tensor is a chunk."""
    monkeypatch.setattr("dapo_mega.weight_sync.encodings._CHUNK_BYTES", 1)


@pytest.fixture
def delta_sync(processes, fleet):
    config = WeightSyncConfig(timeout_s=TIMEOUT_S, full_every=3)
    sync = Pushing(processes, fleet, config, BroadcastSender(processes, config, dtype="bf16"))
    fleet.without_plugin = set()
    yield sync
    fleet.disconnect()
    sync.close()
