"""This rank's place in the parallel layout."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This rank's place in the layout.

    A replica is one copy of the model on tensor x context x pipeline ranks (experts may be sharded over replicas too).
    Its leader is the rank of the first pipeline stage with tensor and context rank 0. Three gloo groups carry host
    data: `control` has all ranks, `leaders` the replicas' leaders (rank 0 first), `replica` this replica's ranks (its
    leader first). `context` is Megatron's group of the ranks that share a micro-batch's tokens; None without context
    parallelism.
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
    def per_stage(self) -> int:
        """How many processes of a replica hold one pipeline stage."""
        return self.tensor_size * self.context_size

    def of_replica(self, replica: int) -> list[int]:
        """The replica's ranks by pipeline, context and tensor rank; between pipeline and context rank Megatron numbers
        processes by data rank."""
        firsts = [(stage * self.data_size + replica) * self.per_stage for stage in range(self.pipeline_size)]
        return [first + offset for first in firsts for offset in range(self.per_stage)]

    @property
    def is_leader(self) -> bool:
        return self.tensor_rank == 0 and self.context_rank == 0 and self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def counts_outputs(self) -> bool:
        """Whether a sum over all processes takes this one's outputs: of the processes that have a token's, one does."""
        return self.is_last_stage and self.tensor_rank == 0


def world_size_from_environment() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))
