"""Repairs the optimizer's state for Megatron-Core's `fully_reshardable` checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dapo_mega.distributed import accelerator


def allocate_adam_state(optimizer: Any) -> None:
    """Allocate torch's Adam state as zeros before the first step: Megatron reads the step count from it when
    saving and loading. The optimizers of Apex and Transformer Engine need none of this. Can go when Megatron takes the
    count as 0 for an optimizer without state."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if not _is_torch_adam(inner):
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def share_adam_step(optimizer: Any) -> None:
    """Give the step count to optimizers without parameters, as of LoRA in pipeline stages without layers: Megatron
    reads it from the first process's when saving, and fails where it finds none. Collective. Can go when it takes the
    count from optimizers that have parameters."""
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    counts = [float(state["step"]) for each in inner for state in each.state.values() if "step" in state]
    counts += [float(group.get("step", 0)) for each in inner for group in each.param_groups]
    step = torch.tensor(max(counts, default=0.0), device=accelerator.device())
    dist.all_reduce(step, dist.ReduceOp.MAX)
    for each in inner:
        if any(group["params"] for group in each.param_groups):
            continue
        if _is_torch_adam(each):
            each.state["no parameter"] = {"step": step.cpu()}
        for group in each.param_groups:
            group["step"] = int(step)


def keep_adam_step(optimizer: Any) -> None:
    """Megatron expects torch's step count among the tensors of a `fully_reshardable` checkpoint, which keeps it
    in the groups. Can go when _set_main_param_and_optimizer_states skips "step" as saving does."""
    for part in optimizer.chained_optimizers:
        if _is_torch_adam(part.optimizer):
            part._set_main_param_and_optimizer_states = functools.partial(_set_states_but_step, part)


def keep_bucket_padding(optimizer: Any) -> None:
    """Megatron gathers the optimizer's state without the padding at the end of each gradient bucket, and then
    slices parameters by positions that count the padding: with more than one bucket (tied embeddings on several
    pipeline stages have their own) the checkpoint would hold shifted state. This puts the padding back. Can go when
    sharded_param_state_fully_reshardable cuts what get_parameter_state_dp_zero returns."""
    for part in optimizer.chained_optimizers:
        part.get_parameter_state_dp_zero = functools.partial(_padded_world_state, part)


def _padded_world_state(part: Any, **settings: Any) -> Any:
    state = type(part).get_parameter_state_dp_zero(part, **settings)
    if state is None:
        return None
    for index, buffer in enumerate(part.buffers):
        for tensors in state[index].values():
            for name, compact in tensors.items():
                if isinstance(compact, torch.Tensor):
                    tensors[name] = _with_bucket_padding(compact, buffer)
    return state


def _with_bucket_padding(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    """[n without padding] to [buffer.numel], every bucket where the buffer has it."""
    padded = torch.zeros(buffer.numel, dtype=compact.dtype)
    start = 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[start:end]
        start = end
    assert start == len(compact)
    return padded


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def separate_adam_steps(optimizer: Any) -> None:
    """Megatron loads one step tensor shared by all parameters, which torch's Adam then counts up once for each
    of them: the bias correction of the next updates would be wrong. Can go when it gives each parameter its own."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _set_states_but_step(part: Any, model_param: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    step = part.optimizer.state[main_param]["step"]
    type(part)._set_main_param_and_optimizer_states(part, model_param, {**tensors, "step": step})
