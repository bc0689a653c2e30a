"""Megatron's groups of processes: this process's ranks, and what it exchanges with the others of a group."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from dapo_mega.config import ParallelConfig


def start_groups(config: ParallelConfig, seed: int) -> None:
    """Make the groups of this layout and seed the random numbers of each. Collective over all processes."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
    )
    model_parallel_cuda_manual_seed(seed)


def stop_groups() -> None:
    """Forget all groups; safe to call without any."""
    parallel_state.destroy_model_parallel()


def ranks() -> dict[str, int]:
    """This process's place along each dimension of the layout, by the names of `Processes`."""
    return {
        "data_rank": parallel_state.get_data_parallel_rank(),
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "context_rank": parallel_state.get_context_parallel_rank(),
        "expert_rank": parallel_state.get_expert_model_parallel_rank(),
    }


def context_group() -> dist.ProcessGroup:
    """The processes that share the tokens of a micro-batch."""
    return parallel_state.get_context_parallel_group()


def pipeline_group() -> dist.ProcessGroup:
    """The processes at this one's place in every pipeline stage."""
    return parallel_state.get_pipeline_model_parallel_group()


def expert_tensor_group() -> dist.ProcessGroup:
    """The processes that share the matrices of each expert."""
    return parallel_state.get_expert_tensor_parallel_group()


def ends_of_pipeline(vp_stage: int | None) -> dict[str, bool]:
    """Whether a model chunk of this process has the embedding, and whether it has the head."""
    return {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    }


def gathered_tokens(part: Tensor, group: dist.ProcessGroup, *, sums_gradients: bool = True) -> Tensor:
    """The parts [T / n, ...] of n processes as [T, ...] on each. Backward each takes the gradient of its part, summed
    over the processes unless all compute the same of the whole."""
    whole: Tensor = gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=sums_gradients, group=group)
    return whole


def shared_input(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`whole` as it is, for processes that each compute their part of something with it: its gradient is summed."""
    same: Tensor = copy_to_tensor_model_parallel_region(whole, group=group)
    return same
