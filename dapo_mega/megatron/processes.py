"""Starts torch.distributed and Megatron's parallel groups, and ends them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dapo_mega.config import ParallelConfig
from dapo_mega.distributed import accelerator
from dapo_mega.distributed.gloo_device import share_gloo_devices
from dapo_mega.distributed.processes import Processes, world_size_from_environment
from dapo_mega.distributed.stores import attempt_prefix, open_store
from dapo_mega.errors import InputError
from dapo_mega.megatron.core import groups
from dapo_mega.megatron.core.repairs import cpu_accelerator

# Ranks wait in these groups while rank 0 collects rollouts, which may take hours.
_CONTROL_TIMEOUT = timedelta(hours=12)
_COMPUTE_TIMEOUT = timedelta(minutes=30)
_STORE_TIMEOUT_S = 300.0


def start_processes(config: ParallelConfig, seed: int) -> Processes:
    """Join the process group and Megatron's groups, on this rank's GPU if there are GPUs.

    Raises InputError for sizes that do not fit the world.
    """
    cpu_accelerator.install()
    share_gloo_devices()
    world_size = world_size_from_environment()
    if config.world_size not in (None, world_size):
        raise InputError(
            f"parallel.world_size={config.world_size} but {world_size} processes were started; start that many with "
            f"torchrun or set parallel.world_size={world_size}"
        )
    try:
        data_size = config.data_size(world_size)
    except ValueError as error:
        raise InputError(str(error)) from error
    accelerator.select(int(os.environ.get("LOCAL_RANK", "0")))
    device = accelerator.device()
    if not dist.is_initialized():
        _join_process_group(device)
    groups.start_groups(config, seed)
    # All ranks must create groups in the same order. Megatron orders ranks by tensor, context, data, pipeline.
    control = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    per_stage = config.tensor * config.context
    leaders = dist.new_group(
        [data_rank * per_stage for data_rank in range(data_size)], backend="gloo", timeout=_CONTROL_TIMEOUT
    )
    replicas = [
        dist.new_group(
            [
                (stage * data_size + data_rank) * per_stage + i
                for stage in range(config.pipeline)
                for i in range(per_stage)
            ],
            backend="gloo",
            timeout=_CONTROL_TIMEOUT,
        )
        for data_rank in range(data_size)
    ]
    ranks = groups.ranks()
    return Processes(
        rank=dist.get_rank(),
        world_size=world_size,
        **ranks,
        data_size=data_size,
        tensor_size=config.tensor,
        pipeline_size=config.pipeline,
        context_size=config.context,
        expert_size=config.expert,
        device=device,
        control=control,
        leaders=leaders,
        replica=replicas[ranks["data_rank"]],
        context=groups.context_group() if config.context > 1 else None,
    )


def _join_process_group(device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    store: dist.Store
    if "MASTER_ADDR" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=_COMPUTE_TIMEOUT))
    else:
        # A default gloo device would listen on all interfaces.
        store, rank, world_size = open_store("127.0.0.1", _STORE_TIMEOUT_S), 0, 1
    store = dist.PrefixStore(attempt_prefix(), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_COMPUTE_TIMEOUT)


def stop_processes() -> None:
    """Destroy all groups; safe to call without any."""
    groups.stop_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
