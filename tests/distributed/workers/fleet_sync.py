"""Worker: two pipeline stages bring weights to three engines, one of which fails while the second stage sends.

Arguments: JSON with the fault of each update. Rank 0 prints what became of it, one JSON line per update.
"""

from __future__ import annotations

import json
import os
import sys

# Longer than the test's deadline: whoever waits for a failed engine's timeout does not make it.
TIMEOUT_S = 600.0
STAGES = (0, 1, 1, 0)


def main() -> None:
    import torch
    import torch.distributed as dist

    from dapo_mega.config import WeightSyncConfig
    from dapo_mega.distributed.processes import Processes
    from dapo_mega.weight_sync.broadcast import BroadcastTransport
    from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
    from tests.unit.weight_sync.scripted_engines import ScriptedFleet

    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    ones = dict.fromkeys(("data_size", "tensor_size", "context_size", "expert_size"), 1)
    zeros = dict.fromkeys(("data_rank", "tensor_rank", "context_rank", "expert_rank"), 0)
    processes = Processes(
        rank=rank, world_size=2, pipeline_rank=rank, pipeline_size=2, **ones, **zeros,
        device=torch.device("cpu"), control=group, leaders=group, replica=group,
    )  # fmt: skip
    fleet = ScriptedFleet(3, TIMEOUT_S) if rank == 0 else None
    config = WeightSyncConfig(timeout_s=TIMEOUT_S)
    sync = FleetWeightSync(processes, fleet, config, BroadcastTransport(processes, config))
    for version, fault in enumerate(json.loads(sys.argv[1]), start=1):
        if fleet:
            fleet.return_all()
            fleet.engines["http://e1"].faults = {("update", 2): fault}
        policy = Policy(rank, version)
        metrics = sync.push(policy, version)
        if fleet:
            exact = [url for url, engine in fleet.engines.items() if policy.owns_shard(engine)]
            print(json.dumps({"exact": exact, "away": list(fleet.away), "bytes": metrics["weight_sync/bytes"]}))
    sys.stdout.flush()
    dist.barrier()
    # The broadcast that the failed engine never joined would end with its timeout.
    os._exit(0)


class Policy:
    """One tensor per bucket; both stages know all values, so that rank 0 can compare."""

    def __init__(self, rank, version):
        import torch

        random = torch.Generator().manual_seed(version)
        self._tensors = [torch.randn(6, generator=random) for _ in STAGES]
        self._rank = rank

    def stage_weights(self, bucket_bytes):
        import torch

        from dapo_mega.types import WeightBucket, WeightSpec

        for number, stage in enumerate(STAGES):
            specs = (WeightSpec(f"w{number}", torch.float32, (6,)),)
            tensors = [self._tensors[number]] if stage == self._rank else None
            yield WeightBucket(stage, specs, tensors, number == len(STAGES) - 1)

    def owns_shard(self, engine):
        import torch

        return all(torch.equal(engine.weights[f"w{i}"], tensor) for i, tensor in enumerate(self._tensors))


if __name__ == "__main__":
    main()
