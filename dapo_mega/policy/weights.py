"""Moves weights between Hugging Face checkpoints and the shards of this process, by the family's table.

Every process walks the same list of parameters of all pipeline stages in the same order, so gathering needs no
negotiation: a stage's processes contribute when their parameters come up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dapo_mega.errors import InputError
from dapo_mega.models import Architecture, ModelFamily, merge_shards, take_shard
from dapo_mega.models.families import PlacedTensor
from dapo_mega.policy.processes import Processes


class HfCheckpoint:
    """Reads single tensors of a Hugging Face safetensors checkpoint. Errors name the file and the tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        self._handles: dict[Path, Any] = {}
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError) as error:
                raise InputError(
                    f"{index} is not a valid safetensors index ({error}); copy the checkpoint again"
                ) from error
            self._files = {name: path / file for name, file in weight_map.items()}
        elif single.is_file():
            self._files = dict.fromkeys(self._open(single).keys(), single)
        else:
            raise InputError(f"{path} holds neither model.safetensors nor model.safetensors.index.json")

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(
                    f"{file} cannot be read as safetensors ({error}); copy the checkpoint again"
                ) from error
        return self._handles[file]

    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise InputError(f"{self.path} lacks the tensor {name!r}; is it a checkpoint of another model?")
        try:
            tensor: Tensor = self._open(self._files[name]).get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"tensor {name!r} cannot be read from {self._files[name]} ({error})") from error
        return tensor


@dataclass(frozen=True)
class StageLayout:
    """Which layers each pipeline stage holds, and what that means for parameter names."""

    family: ModelFamily
    arch: Architecture
    pipeline_size: int

    def layers(self, stage: int) -> range:
        per_stage = self.arch.num_layers // self.pipeline_size
        return range(stage * per_stage, (stage + 1) * per_stage)

    def tensors(self, stage: int) -> Iterator[PlacedTensor]:
        return self.family.tensors(self.arch, self.layers(stage), stage == 0, stage == self.pipeline_size - 1)


def stage_parameters(stage: torch.nn.Module, first_layer: int) -> dict[str, torch.nn.Parameter]:
    """Parameters of a GPTModel by name, with local layer numbers made global."""
    parameters = {}
    for name, parameter in stage.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first_layer)
        parameters[".".join(parts)] = parameter
    return parameters


def _local(parameters: dict[str, torch.nn.Parameter], placed: PlacedTensor) -> torch.nn.Parameter:
    return next(parameters[name] for name in placed.megatron if name in parameters)


def load_hf_weights(stage: torch.nn.Module, path: Path, layout: StageLayout, processes: Processes) -> None:
    """Fill this process's shard from the Hugging Face checkpoint in `path`; reads only what the shard needs.

    Raises InputError naming a missing tensor or one whose shape does not fit, and a parameter left unfilled.
    """
    checkpoint = HfCheckpoint(path)
    parameters = stage_parameters(stage, layout.layers(processes.pipeline_rank).start)
    wanted = list(layout.tensors(processes.pipeline_rank))
    if layout.arch.tied_embeddings and processes.is_last_stage and processes.pipeline_size > 1:
        # The last stage keeps its own copy of the tied embedding as its output layer.
        embedding = next(iter(layout.tensors(0)))
        wanted.append(PlacedTensor(("output_layer.weight",), embedding.hf, embedding.layout))
    filled = set()
    for placed in wanted:
        parameter = _local(parameters, placed)
        full = [checkpoint.tensor(name) for name in placed.hf]
        try:
            shard = take_shard(full, placed.layout, layout.arch, processes.tensor_rank, processes.tensor_size)
        except RuntimeError as error:
            raise InputError(f"{path}: {', '.join(placed.hf)} do not have the shapes config.json says") from error
        if shard.shape != parameter.shape:
            raise InputError(
                f"{path}: {', '.join(placed.hf)} give a shard of shape {tuple(shard.shape)}, expected "
                f"{tuple(parameter.shape)}; config.json and the weights are of different models"
            )
        with torch.no_grad():
            parameter.copy_(shard)
        filled.add(id(parameter))
    unfilled = [name for name, parameter in parameters.items() if id(parameter) not in filled]
    assert not unfilled, f"parameters without a rule: {unfilled}"


class WeightGatherer:
    """Streams a replica's sharded weights as full tensors under their Hugging Face names to its leader."""

    def __init__(self, stage: torch.nn.Module, layout: StageLayout, processes: Processes) -> None:
        """Collective over the replica: stages tell each other the shapes of their shards once."""
        self._layout = layout
        self._processes = processes
        self._parameters = stage_parameters(stage, layout.layers(processes.pipeline_rank).start)
        self._dtype = next(iter(self._parameters.values())).dtype
        mine = [tuple(_local(self._parameters, placed).shape) for placed in layout.tensors(processes.pipeline_rank)]
        shapes: list[Any] = [None] * processes.pipeline_size
        dist.all_gather_object(shapes, mine, group=parallel_state.get_pipeline_model_parallel_group())
        self._shapes: list[list[tuple[int, ...]]] = shapes

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors in buckets of at most `bucket_bytes` (or one parameter, if that is larger).

        A collective: all processes of a replica must iterate to the end in step. Buckets come in checkpoint
        order, stage by stage; they are filled on the replica's leader and empty on its other processes.
        """
        for owner in range(self._processes.pipeline_size):
            pending: list[tuple[PlacedTensor, tuple[int, ...]]] = []
            size = 0
            for placed, shape in zip(self._layout.tensors(owner), self._shapes[owner], strict=True):
                nbytes = math.prod(shape) * self._dtype.itemsize * self._processes.tensor_size
                if pending and size + nbytes > bucket_bytes:
                    yield self._gather(pending, owner)
                    pending, size = [], 0
                pending.append((placed, shape))
                size += nbytes
            yield self._gather(pending, owner)

    def _gather(self, pending: list[tuple[PlacedTensor, tuple[int, ...]]], owner: int) -> list[tuple[str, Tensor]]:
        """One bucket: tensor-parallel shards to the stage's first process, from there to the leader."""
        me = self._processes
        numel = sum(math.prod(shape) for _, shape in pending)
        stacked = torch.empty(0)
        if me.pipeline_rank == owner:
            flat = torch.cat([_local(self._parameters, placed).detach().flatten() for placed, _ in pending])
            stacked = _gather_to_first(flat, me)
        if owner != 0 and me.tensor_rank == 0:
            ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
            if me.pipeline_rank == owner:
                dist.send(stacked, ranks[0])
            elif me.pipeline_rank == 0:
                stacked = torch.empty(me.tensor_size, numel, dtype=self._dtype, device=me.device)
                dist.recv(stacked, ranks[owner])
        if not me.is_leader:
            return []
        named: list[tuple[str, Tensor]] = []
        start = 0
        for placed, shape in pending:
            end = start + math.prod(shape)
            shards = [row[start:end].view(shape) for row in stacked]
            named.extend(zip(placed.hf, merge_shards(shards, placed.layout, self._layout.arch), strict=True))
            start = end
        return named


def _gather_to_first(flat: Tensor, processes: Processes) -> Tensor:
    """[tp, n] on tensor rank 0, empty elsewhere."""
    if processes.tensor_size == 1:
        return flat[None]
    group = parallel_state.get_tensor_model_parallel_group()
    first = processes.tensor_rank == 0
    stacked = torch.empty(processes.tensor_size if first else 0, len(flat), dtype=flat.dtype, device=flat.device)
    dist.gather(flat, list(stacked.unbind()) if first else None, dst=dist.get_global_rank(group, 0), group=group)
    return stacked
