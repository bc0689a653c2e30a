"""Worker: two pipeline stages bring weights to three engines, one of which fails while the second stage sends.

Arguments: JSON with the fault of each update. Rank 0 prints what became of it, one JSON line per update.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from dapo_mega.config import WeightSyncConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.types import WeightBucket, WeightSpec
from dapo_mega.weight_sync.broadcast import BroadcastTransport
from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
from tests.unit.weight_sync.scripted_engines import ScriptedFleet

# Longer than the test's deadline: whoever waits for a failed engine's timeout does not make it.
TIMEOUT_S = 600.0
STAGES = (0, 1, 1, 0)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fleet = ScriptedFleet(3, TIMEOUT_S) if rank == 0 else None
    sync = two_stages_sync(fleet, TIMEOUT_S)
    for version, fault in enumerate(json.loads(sys.argv[1]), start=1):
        if fleet:
            fleet.return_all()
            fleet.engines["http://e1"].faults = {("update", 2): fault}
        policy = Policy(rank, version)
        metrics = sync.push(policy, version)
        if fleet:
            exact = [url for url, engine in fleet.engines.items() if policy.is_held_by(engine)]
            print(json.dumps({"exact": exact, "away": list(fleet.away), "bytes": metrics["weight_sync/bytes"]}))
    sys.stdout.flush()
    dist.barrier()
    # The broadcast that the failed engine never joined would end with its timeout.
    os._exit(0)


def two_stages_sync(fleet, timeout_s):
    """Collective, in a group of two processes: pipeline stages of one process each. `fleet` is rank 0's."""
    rank, group = dist.get_rank(), dist.group.WORLD
    ones = dict.fromkeys(("data_size", "tensor_size", "context_size", "expert_size"), 1)
    zeros = dict.fromkeys(("data_rank", "tensor_rank", "context_rank", "expert_rank"), 0)
    processes = Processes(
        rank=rank, world_size=2, pipeline_rank=rank, pipeline_size=2, **ones, **zeros,
        device=torch.device("cpu"), control=group, leaders=group, replica=group,
    )  # fmt: skip
    config = WeightSyncConfig(timeout_s=timeout_s)
    return FleetWeightSync(processes, fleet, config, BroadcastTransport(processes, config))


class Policy:
    """One tensor per bucket; both stages know all values, so that rank 0 can compare."""

    def __init__(self, rank, version):
        random = torch.Generator().manual_seed(version)
        self._tensors = [torch.randn(6, generator=random) for _ in STAGES]
        self._rank = rank

    def stage_weights(self, bucket_bytes):
        for number, stage in enumerate(STAGES):
            specs = (WeightSpec(f"w{number}", torch.float32, (6,)),)
            tensors = [self._tensors[number]] if stage == self._rank else None
            yield WeightBucket(stage, specs, tensors, number == len(STAGES) - 1)

    def is_held_by(self, engine):
        names = [f"w{number}" for number in range(len(STAGES))]
        return engine.weights.keys() == set(names) and all(
            torch.equal(engine.weights[name], tensor) for name, tensor in zip(names, self._tensors, strict=True)
        )


if __name__ == "__main__":
    main()
