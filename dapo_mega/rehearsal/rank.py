"""What one rank does in a rehearsal: everything of a step in which ranks meet."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import default_planner
from torch.utils._pytree import tree_leaves

from dapo_mega.batching.samples import FlatSamples, flatten, single_turn
from dapo_mega.batching.step import plan_samples
from dapo_mega.config import RunConfig
from dapo_mega.distributed import accelerator
from dapo_mega.distributed.commands import Own
from dapo_mega.megatron import fused_logprobs, logprobs
from dapo_mega.megatron.core import checkpoint_files
from dapo_mega.megatron.core.layers import is_fp8
from dapo_mega.megatron.core.optimization import gradient_buffers, optimizer_state
from dapo_mega.megatron.core.repairs import cpu_accelerator
from dapo_mega.megatron.core.repairs.offloaded_optimizer import HybridDeviceOptimizer
from dapo_mega.megatron.megatron_model import MegatronModel
from dapo_mega.megatron.objectives import needs_whole_trajectories
from dapo_mega.megatron.processes import start_processes
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.models import Architecture, ModelFamily, stored_model
from dapo_mega.models.hf_checkpoint import TensorSource, TensorSpec, all_tensors
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.planning.workload import Workload
from dapo_mega.rehearsal.communication import Event, World
from dapo_mega.rehearsal.device import DEVICE, PretendedDevice, attention, even_choice, rms_norm
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


@dataclass(frozen=True)
class Peak:
    """The most bytes that a phase held at once, of what kinds, and in which operation at which place in the code."""

    num_bytes: int
    kinds: Mapping[str, int]
    operation: str
    place: str


@dataclass(frozen=True)
class Played:
    """What a rank did: the communications in their order, and of each phase the peak of memory and the floating-point
    operations. `always` are the bytes of parameters, gradients and optimizer; `num_micro_batches` are those of each
    update."""

    events: list[Event]
    peaks: Mapping[str, Peak]
    flops: Mapping[str, int]
    always: Mapping[str, int]
    num_micro_batches: list[int]

    @property
    def most(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.num_bytes)


def rehearse(config: RunConfig, world: World, samples: FlatSamples | None, *, all_are_here: bool) -> Played:
    """One step of the run as this rank: build, take samples (of rank 0), score, update, gather weights, and save up to
    the writing of files. Where ranks stand for others (not `all_are_here`), a checkpoint seems to hold theirs twice:
    whether it holds everything once is then not asked."""
    os.environ |= {"WORLD_SIZE": str(world.size), "RANK": str(world.rank)}
    world.start()
    _pretend()
    if not all_are_here:
        checkpoint_files.dist_checkpointing.state_dict_utils.validate_sharding_integrity = lambda *_, **__: None
        check = default_planner._validate_global_plan
        default_planner._validate_global_plan = lambda global_plan, metadata: check(
            [], replace(metadata, state_dict_metadata={})
        )
    trainer = TrainerAlone(config, start_processes(config.parallel, config.seed))
    device = PretendedDevice()
    cpu_accelerator.kernel = device.kernel
    adam: Any = importlib.import_module("torch.optim.adam")
    steps = adam.adam

    def fused(*args: Any, **kwargs: Any) -> None:
        """As a GPU has it: in place."""
        with device.kernel():
            steps(*args, **kwargs)

    adam.adam = fused
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        """As Megatron empties what it recomputes, without an operation of torch."""
        result = resize(storage, size)
        device.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
    peaks: dict[str, Peak] = {}
    flops: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        gc.collect()
        _name_memory(device, trainer)
        device.forget_peak()
        world.phase, before = name, device.flops
        device.keeps_large_here = name == "save"
        with device.holding("buckets" if name == "weights" else "activations"):
            yield
        peaks[name] = Peak(device.peak, device.at_peak, *device.where)
        flops[name] = device.flops - before

    _leave_out_offloaded(device)
    with device, _parameters_are_there():
        with device.holding("parameters"):
            trainer.build(with_engines=False)
        tensor = config.parallel.tensor
        device.num_logits = trainer.policy.arch.padded_vocab_size(tensor) // tensor
        for model in filter(None, (trainer.policy, trainer.critic)):
            device.call_it("gradients", gradient_buffers(model.chunks))
            model.optimizer.step = device.holds("optimizer", model.optimizer.step)
        play_step(trainer, config, samples, phase)
        _name_memory(device, trainer)
        kinds = ("parameters", "gradients", "optimizer", *(("FP8 weights",) if config.compute.fp8.enabled else ()))
        always = {kind: device.live[kind] for kind in kinds}
    num_micro_batches = list(map(len, trainer._batch.mini_batches))
    return Played(world.events, peaks, flops, always, num_micro_batches)


def play_step(
    trainer: Trainer,
    config: RunConfig,
    samples: FlatSamples | None,
    phase: Callable[[str], AbstractContextManager[None]],
) -> None:
    """What processes do together in a step after they were built: take samples, which rank 0 has, score, update, and
    gather weights for engines; each within `phase(name)`."""
    with phase("take"):
        planned = None
        if samples is not None:
            planned = plan_samples(
                samples,
                trainer.policy.packing_layout,
                token_budget=config.batch.tokens_per_microbatch,
                groups_per_update=config.batch.mini_batch_groups,
                whole_trajectories=needs_whole_trajectories(config),
            )
        trainer._take(Own(planned))
    if config.compute.fp8.scaling == "delayed":  # The first scoring of a run finds scales beforehand.
        with phase("scales"):
            trainer.score(0)
    with phase("score"):
        scores = trainer.score(0)
        if scores.penalties is not None:
            trainer.set_advantages(np.zeros_like(scores.penalties))
    with phase("update"):
        trainer.update(0.0)
    with phase("weights"):
        source = trainer.policy.selected("adapters" if config.sends_adapters else "merged")
        for bucket in source.weights(config.weight_sync.bucket_bytes):
            for _ in bucket.tensors or ():
                pass
    with phase("save"):
        trainer.store.save(trainer.policy, None, 1, trainer.critic)


class TrainerAlone(Trainer):
    """A trainer whose commands are calls: every rank that is rehearsed calls them by itself."""

    def command(self, method: Any, arguments: Any, named: Any) -> list[Any]:
        return [method(self, *arguments, **named)]


def _name_memory(device: PretendedDevice, trainer: Trainer) -> None:
    """Call what models have made by now by its kind: the optimizer's state, FP8 weights beside those in bf16."""
    for model in filter(None, (trainer.policy, trainer.critic)):
        device.call_it("optimizer", _own_state(model))
    for built in (trainer.policy, trainer.critic, trainer.reference, *trainer.teachers.values()):
        for chunk in built.chunks if isinstance(built, MegatronModel) else ():
            device.call_it("parameters", _parts(chunk.parameters()))
            copies = (vars(module).get("_fp8_workspaces", {}).values() for module in chunk.modules())
            device.call_it("FP8 weights", _parts(chain.from_iterable(copies)))


def _parts(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """What tensors in FP8 are made of: bytes and scales. Megatron's notes on parameters have other names."""
    for tensor in tensors:
        if is_fp8(tensor):
            yield from (part for name, part in vars(tensor).items() if name[0] == "_" and isinstance(part, Tensor))


def _own_state(model: TrainedModel) -> Iterator[Tensor]:
    """What the optimizer keeps beside the weights."""
    own = {parameter.untyped_storage()._cdata for chunk in model.chunks for parameter in chunk.parameters()}
    return (tensor for tensor in optimizer_state(model.optimizer) if tensor.untyped_storage()._cdata not in own)


def _pretend() -> None:
    """Let this process build as for a GPU, on a device without values."""
    accelerator.device = lambda: DEVICE
    cpu_accelerator._CPU = DEVICE
    torch.nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    torch.nn.functional.rms_norm = rms_norm  # type: ignore[assignment]
    logprobs._kernels_for = lambda logits: _Kernels  # type: ignore[assignment,return-value]
    fused_logprobs.CHUNK_BYTES["meta"] = fused_logprobs.CHUNK_BYTES["cuda"]
    # No file of a checkpoint is written.
    checkpoint_files.from_snapshot = lambda request, *_: request._replace(async_fn=None, preload_fn=None)
    cpu_accelerator.install()
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
    of_megatron.distributed.new_group = dist.new_group
    of_megatron.distributed.batch_isend_irecv = dist.batch_isend_irecv


def _leave_out_offloaded(device: PretendedDevice) -> None:
    """Take what Megatron's offloading optimizer keeps and updates on the host for tensors that are not counted."""
    hybrid: Any = HybridDeviceOptimizer
    hybrid._set_sub_optimizer_grads = device.beside(hybrid._set_sub_optimizer_grads)
    make = device.beside(hybrid.__init__)

    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **{**kwargs, "fused": False})  # The host's fused kernel takes no tensors without values.
        for on_host in optimizer.cpu_optimizers:
            on_host.step = device.beside(on_host.step)

    hybrid.__init__ = __init__


@contextlib.contextmanager
def _parameters_are_there() -> Iterator[None]:
    """Module.to() gives parameters to new tensors, which fake ones refuse; all are on the device and of their type."""
    original, type_of = torch.nn.Module._apply, torch.Tensor.type

    def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for part in module.modules():
            tensors: Any
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or (moved := function(tensor.detach())) is tensor:
                        continue
                    if (moved.dtype, moved.device) != (tensor.dtype, tensor.device):
                        tensors[name] = _like(tensor, moved)
        return module

    def type_(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(tensor, *args, **kwargs)
        return result.replace(".meta.", ".") if isinstance(result, str) else result

    torch.nn.Module._apply, torch.Tensor.type = _apply, type_  # type: ignore[method-assign,assignment]
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
    """The configuration with models whose tensors have no values; a critic or a teacher that is not here is
    made from the policy."""
    config = config.model_copy(update={"output_dir": str(folder)})
    if not Path(config.model.path).is_dir():
        assert config.model.architecture
        (folder / "config.json").write_text(Path(config.model.architecture).read_text())
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    if config.critic.path and not Path(config.critic.path).is_dir():
        config = config.model_copy(update={"critic": config.critic.model_copy(update={"path": None})})
    if given := config.distillation:
        teachers = {
            name: teacher.model_copy(update={"path": config.model.path})
            if teacher.path and not Path(teacher.path).is_dir()
            else teacher
            for name, teacher in given.teachers.items()
        }
        config = config.model_copy(update={"distillation": given.model_copy(update={"teachers": teachers})})
    original, head_of = stored_model.open_source, stored_model.stored_value_head

    def open_source(path: Path, family: ModelFamily, arch: Architecture) -> WithoutValues:
        return WithoutValues(path, family, arch, None if path == folder else original(path, family, arch))

    stored_model.open_source = open_source  # type: ignore[assignment]
    stored_model.stored_value_head = lambda path: frozenset() if path == folder else head_of(path)
    try:
        yield config
    finally:
        stored_model.open_source, stored_model.stored_value_head = original, head_of


def synthetic_samples(workload: Workload) -> FlatSamples:
    """A step of equally long samples, all of whose tokens behind the prompt are scored. Routes that are replayed go
    through all experts equally often."""
    arch, batch = workload.placement.arch, workload.config.batch
    length, prompt = workload.longest, workload.config.data.max_prompt_tokens
    ids, logprobs = np.ones(length, np.int32), np.full(length - prompt, -1.0, np.float32)
    routes = torch.empty(length, 0, 0, dtype=torch.int16)
    if arch.experts and workload.config.rollout.routing_replay:
        of_layer = even_choice((length, arch.experts.per_token), arch.experts.number)
        routes = of_layer.to(torch.int16)[:, None].expand(-1, arch.num_layers, -1)
    shape = (length, distillation.top_k if (distillation := workload.config.distillation) else 0)
    top = {"teacher_top_ids": torch.zeros(shape, dtype=torch.int32), "teacher_top_logprobs": torch.zeros(shape)}
    samples = []
    for number in range(workload.responses_per_step):
        sample = single_turn(ids[:prompt], ids[prompt:], logprobs, advantage=(-1.0) ** number, sample_id=number)
        samples.append(replace(sample, routes=routes, **top))
    return flatten(samples, groups=[number // batch.group_size for number in range(len(samples))])
