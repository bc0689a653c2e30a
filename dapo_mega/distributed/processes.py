"""Which part of the parallel layout this process is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process's place in the layout.

    A replica is one copy of the model, spread over tensor x context x pipeline processes (the experts of a mixture
    are spread over replicas too); its leader is the process of the first pipeline stage with tensor and context
    rank 0. `control` is a gloo group of all processes for host data, `leaders` one of the replicas' leaders, rank 0
    first, `replica` one of this replica's processes, its leader first. `context` is Megatron's group of the processes
    that share the tokens of a micro-batch; None without context parallelism.
    """

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int
    expert_rank: int
    expert_size: int
    device: torch.device
    control: dist.ProcessGroup
    leaders: dist.ProcessGroup
    replica: dist.ProcessGroup
    context: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        return self.tensor_rank == 0 and self.context_rank == 0 and self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1


def world_size_from_environment() -> int:
    """Number of processes as torchrun says; 1 when started without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))
