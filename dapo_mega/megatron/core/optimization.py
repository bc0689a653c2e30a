"""Megatron's gradients, optimizer and learning-rate schedule, and the losses of routers that it collects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from dapo_mega.config import ComputeConfig, OptimizerConfig
from dapo_mega.distributed import accelerator
from dapo_mega.megatron.core.repairs.optimizer_checkpoints import separate_adam_steps
from dapo_mega.megatron.core.repairs.since_0_19.optimizer_groups import find_groups_by_their_parameters
from dapo_mega.megatron.core.repairs.until_0_16 import router_losses as tracker_of_0_16
from dapo_mega.megatron.core.settings import TransformerConfig


def with_gradients(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, compute: ComputeConfig
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP: contiguous float32 gradient buffers, reduce-scatter for the distributed
    optimizer, and hooks with which the schedules overlap communication and computation."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=compute.overlap_grad_reduce,
        overlap_param_gather=compute.overlap_param_gather,
        fp8_param_gather=compute.fp8.params,
        check_for_nan_in_grad=False,  # `TrainedModel` looks at the whole gradient, on all ranks alike.
    )
    # Later chunks reduce while earlier ones still compute, so only the first chunk needs buckets.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if compute.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync[0] if len(wrapped) == 1 else no_sync
    return wrapped


def make_optimizer(
    config: OptimizerConfig, transformer: TransformerConfig, compute: ComputeConfig, chunks: Sequence[Any]
) -> Any:
    """Distributed AdamW with gradient clipping, of chunks `with_gradients`."""
    # Without a GPU the optimizer's state is in host memory already.
    offload = compute.optimizer_offload if accelerator.has_gpu() else 0.0
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        min_lr=config.learning_rate if config.schedule == "constant" else 0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        clip_grad=config.clip_grad,
        bf16=transformer.bf16,
        params_dtype=transformer.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=compute.overlap_param_gather,
        optimizer_cpu_offload=offload > 0,
        optimizer_offload_fraction=offload,
        overlap_cpu_optimizer_d2h_h2d=offload > 0,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    # With adapters of spread experts only, that of all else is none, which Megatron cannot save.
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if part.optimizer]
    return optimizer


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Continue from the state of a checkpoint. Settings, such as learning rates and betas, stay those of the
    configuration."""
    settings = [{k: v for k, v in g.items() if k not in ("params", "step")} for g in optimizer.param_groups]
    find_groups_by_their_parameters()
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
        if "step" in group:
            group["step"] = int(group["step"])  # Torch's Adam saves a float, which fused kernels refuse.
    separate_adam_steps(optimizer)


def counted_weights(optimizer: Any) -> Iterator[Tensor]:
    """This process's part of all weights, in the precision of the optimizer: over all processes each is in one part."""
    for part in optimizer.chained_optimizers:
        for weight in part.get_parameters():
            if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight):
                yield weight


def optimizer_state(optimizer: Any) -> Iterator[Tensor]:
    """What an optimizer keeps for each weight of its own, and its copies of weights."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def gradient_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """The memory of the gradients of chunks `with_gradients`."""
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers])


def make_schedule(optimizer: Any, config: OptimizerConfig, updates_per_step: int, num_steps: int) -> Any:
    """The learning rates of all updates of a run."""
    # The first update has the full rate without a warm-up, and the one after the last would have 0.
    warmup = max(config.warmup_steps * updates_per_step, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.learning_rate if config.schedule == "constant" else 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(num_steps * updates_per_step, warmup) + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A checkpoint restores the schedule's position; its shape comes from the configuration.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def router_losses(config: TransformerConfig, num_micro_batches: int) -> dict[str, float]:
    """The auxiliary losses since the last call, by their names in metrics: means over layers, micro-batches and
    processes. Collective."""
    wanted = {}
    if config.num_moe_experts and config.moe_router_load_balancing_type == "aux_loss":
        wanted["load_balancing_loss"] = "load_balancing_loss"
    if config.num_moe_experts and config.moe_z_loss_coeff:
        wanted["z_loss"] = "router_z_loss"
    if not wanted:
        return {}
    losses: dict[str, Tensor] = {}
    tracker = getattr(moe_utils, "get_moe_metrics_tracker", tracker_of_0_16.Tracker)()
    tracker.report(
        loss_scale=1.0 / num_micro_batches,
        iteration=0,
        total_loss_dict=losses,
        force_initialize=True,
        track_names=list(wanted),
        num_layers=config.num_layers,
    )
    # Its tensors are for this model's number of layers; the next model to use it may have another.
    tracker.metrics.clear()
    return {metric: float(losses[name]) for name, metric in wanted.items()}
