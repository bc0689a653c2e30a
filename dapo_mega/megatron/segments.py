"""Sums over whole trajectories, wherever context parallelism holds their tokens."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms.ratios import segment_sums
from dapo_mega.batching.microbatch import MicroBatch


def sums_by_trajectory(
    micro_batch: MicroBatch,
    values: Tensor,
    context_group: dist.ProcessGroup | None = None,
    *,
    counted: Tensor | None = None,
) -> Tensor:
    """Sum of `values` [N] of response tokens over every trajectory, and number of summed tokens, [2, n] float64,
    detached; they stand at the first segment of each trajectory, and 0 at the others.

    `counted` [N] bool says which tokens to sum (default: all). With `context_group` the micro-batch is this rank's
    slice, and all ranks of the group must call this.
    """
    ids = micro_batch.of_responses(micro_batch.first_segments).to(values.device)
    if counted is not None:
        values, ids = values[counted], ids[counted]
    sums = segment_sums(values, ids, len(micro_batch.cu_seqlens) - 1)
    if context_group is not None:
        dist.all_reduce(sums, group=context_group)
    return sums
