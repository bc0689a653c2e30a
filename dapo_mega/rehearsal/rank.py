"""What one rank does in a rehearsal: everything of a step in which ranks meet."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dapo_mega.batching.samples import FlatSamples, flatten, single_turn
from dapo_mega.batching.step import plan_samples
from dapo_mega.config import RunConfig
from dapo_mega.distributed import accelerator
from dapo_mega.distributed.commands import Own
from dapo_mega.megatron import fused_logprobs, logprobs
from dapo_mega.megatron.core.optimization import gradient_buffers, optimizer_state
from dapo_mega.megatron.core.repairs import cpu_accelerator
from dapo_mega.megatron.objectives import needs_whole_trajectories
from dapo_mega.megatron.processes import start_processes
from dapo_mega.models import Architecture, ModelFamily, stored_model
from dapo_mega.models.hf_checkpoint import TensorSource, TensorSpec, all_tensors
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.rehearsal.communication import World
from dapo_mega.rehearsal.device import DEVICE, PretendedDevice, attention
from dapo_mega.training.trainer import Trainer


class _Kernels:
    """The Triton kernels of log-probs: they change what they are given, in place."""

    @staticmethod
    def chunk_statistics(logits: Tensor, *rest: Any) -> None: ...

    chunk_gradient_ = chunk_statistics


class WithoutValues:
    """The tensors of a checkpoint, or of a model that is not here, by name and shape: on the device, without values."""

    def __init__(self, path: Path, family: ModelFamily, arch: Architecture, source: TensorSource | None) -> None:
        self.path = path
        self._source, self._arch = source, arch
        self._names = {name for placed in all_tensors(family, arch) for name in placed.hf}

    def names(self) -> set[str]:
        return self._source.names() if self._source else self._names

    def weight_files(self) -> set[str]:
        return self._source.weight_files() if self._source else set()

    def spec(self, name: str) -> TensorSpec:
        return self._source.spec(name) if self._source else TensorSpec(hf_shape(name, self._arch), torch.bfloat16)

    def tensor(self, name: str) -> Tensor:
        spec = self.spec(name)
        return torch.empty(spec.shape, dtype=spec.dtype, device=DEVICE)


def rehearse(config: RunConfig, world: World, samples: FlatSamples) -> PretendedDevice:
    os.environ |= {"WORLD_SIZE": str(world.size), "RANK": str(world.rank)}
    world.start()
    accelerator.device = lambda: DEVICE
    cpu_accelerator._CPU = DEVICE
    torch.nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    logprobs._kernels_for = lambda logits: _Kernels  # type: ignore[assignment,return-value]
    fused_logprobs.CHUNK_BYTES["meta"] = fused_logprobs.CHUNK_BYTES["cuda"]
    processes = start_processes(config.parallel, config.seed)
    make = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """torch.tensor(), also of the device's scalars, and with known values on the device."""
        if isinstance(data, list) and any(isinstance(value, Tensor) for value in tree_leaves(data)):
            return torch.stack([value if isinstance(value, Tensor) else tensor(value) for value in data])
        made = make(data, *args, **kwargs)
        return made if device is None else made.to(device)

    torch.tensor = tensor
    of_megatron: Any = cpu_accelerator._torch_for_megatron
    of_megatron.tensor = cpu_accelerator.redirected(tensor)
    trainer = Trainer(config, processes)
    trainer._is_alone = True
    device = PretendedDevice()
    with device, _parameters_are_there():
        with device.holding("parameters"):
            world.phase = "build"
            trainer.build(with_engines=False)
        device.call_it("gradients", gradient_buffers(trainer.policy.chunks))
        world.phase = "scatter"
        planned = plan_samples(
            samples,
            trainer.policy.packing_layout,
            token_budget=config.batch.tokens_per_microbatch,
            groups_per_update=config.batch.mini_batch_groups,
            whole_trajectories=needs_whole_trajectories(config),
        )
        trainer._take(Own(planned if world.rank == 0 else None))
        world.phase = "score"
        gc.collect()
        device.forget_peak()
        device.kind = "activations"
        trainer.score(0)
        print("score", device.peak / 2**30, device.where, {k: round(v / 2**30, 2) for k, v in device.at_peak.items()}, device.flops / 1e12, flush=True)
        world.phase = "update"
        for _ in range(2):
            device.forget_peak()
            trainer.update(0.0)
            print("update", device.peak / 2**30, device.where, {k: round(v / 2**30, 2) for k, v in device.at_peak.items()}, device.flops / 1e12, flush=True)
            device.call_it("optimizer", optimizer_state(trainer.policy.optimizer))
    return device


@contextlib.contextmanager
def _parameters_are_there() -> Iterator[None]:
    """Module.to() gives parameters to new tensors, which fake ones refuse; all are on the device and of their type."""
    original, type_of = torch.nn.Module._apply, torch.Tensor.type

    def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for part in module.modules():
            for named in (part._parameters, part._buffers):
                for name, tensor in named.items():
                    if tensor is None or (moved := function(tensor.detach())) is tensor:
                        continue
                    if (moved.dtype, moved.device) != (tensor.dtype, tensor.device):
                        named[name] = _like(tensor, moved)
        return module

    def type_(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(tensor, *args, **kwargs)
        return result.replace(".meta.", ".") if isinstance(result, str) else result

    torch.nn.Module._apply, torch.Tensor.type = _apply, type_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply, torch.Tensor.type = original, type_of  # type: ignore[method-assign]


def _like(tensor: Tensor, moved: Tensor) -> Tensor:
    """A parameter or buffer elsewhere, with what Megatron has noted about it."""
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in vars(moved):
            setattr(moved, name, value)
    return moved


@contextlib.contextmanager
def without_values(config: RunConfig, folder: Path) -> Iterator[RunConfig]:
    """The configuration with a model whose tensors have no values."""
    path = Path(config.model.path)
    is_here = path.is_dir()
    if not is_here:
        assert config.model.architecture
        (folder / "config.json").write_text(Path(config.model.architecture).read_text())
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    original = stored_model.open_source

    def open_source(path: Path, family: ModelFamily, arch: Architecture) -> WithoutValues:
        return WithoutValues(path, family, arch, original(path, family, arch) if is_here else None)

    stored_model.open_source = open_source  # type: ignore[assignment]
    try:
        yield config
    finally:
        stored_model.open_source = original


def synthetic_samples(num_groups: int, group_size: int, length: int, prompt: int) -> FlatSamples:
    """Groups of equally long samples."""
    ids = np.ones(length, np.int32)
    samples = [
        single_turn(ids[:prompt], ids[prompt:], np.full(length - prompt, -1.0, np.float32), advantage=(-1.0) ** i, sample_id=i)
        for i in range(num_groups * group_size)
    ]
    return flatten(samples, groups=[i // group_size for i in range(len(samples))])
