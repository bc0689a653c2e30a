"""Moves weights between Hugging Face checkpoints and the shards of this process, by the family's table.

Every process walks the same list of parameters of all pipeline stages in the same order, so gathering needs no
negotiation: a stage's processes contribute when their parameters come up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
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
class ChunkLayout:
    """Which layers each model chunk holds. Chunk c stands on stage c % pipeline_size; interleaved stages hold several,
    in the order in which a token passes through them."""

    family: ModelFamily
    arch: Architecture
    pipeline_size: int
    chunks_per_stage: int = 1

    @property
    def num_chunks(self) -> int:
        return self.pipeline_size * self.chunks_per_stage

    def chunks_of(self, stage: int) -> range:
        return range(stage, self.num_chunks, self.pipeline_size)

    def layers(self, chunk: int) -> range:
        per_chunk = self.arch.num_layers // self.num_chunks
        return range(chunk * per_chunk, (chunk + 1) * per_chunk)

    def tensors(self, chunk: int) -> Iterator[PlacedTensor]:
        return self.family.tensors(self.arch, self.layers(chunk), chunk == 0, chunk == self.num_chunks - 1)


Parameters = dict[str, torch.nn.Parameter]


def named_parameters(chunks: Sequence[torch.nn.Module], layout: ChunkLayout, processes: Processes) -> Parameters:
    """Parameters of this process's GPTModels by name, with local layer and expert numbers made global."""
    experts_here = layout.arch.experts.number // processes.expert_size if layout.arch.experts else 0
    first_expert = experts_here * processes.expert_rank
    parameters = {}
    for chunk, module in zip(layout.chunks_of(processes.pipeline_rank), chunks, strict=True):
        for name, parameter in module.named_parameters():
            name = _renumbered(_LAYER_NUMBER, name, layout.layers(chunk).start)
            parameters[_renumbered(_EXPERT_NUMBER, name, first_expert)] = parameter
    return parameters


_LAYER_NUMBER = re.compile(r"(?<=^decoder\.layers\.)\d+")
# `experts.local_experts.3.linear_fc1.weight` in local layers, `experts.linear_fc1.weight3` in grouped ones.
_EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


def _renumbered(number: re.Pattern[str], name: str, first: int) -> str:
    return number.sub(lambda found: str(int(found[0]) + first), name)


def _local(parameters: Parameters, placed: PlacedTensor) -> torch.nn.Parameter:
    return next(parameters[name] for name in placed.megatron if name in parameters)


def load_hf_weights(chunks: Sequence[torch.nn.Module], path: Path, layout: ChunkLayout, processes: Processes) -> None:
    """Fill this process's shard from the Hugging Face checkpoint in `path`; reads only what the shard needs.

    Raises InputError naming a missing tensor or one whose shape does not fit, and a parameter left unfilled.
    """
    checkpoint = HfCheckpoint(path)
    parameters = named_parameters(chunks, layout, processes)
    filled = set()
    for placed in _wanted(layout, processes, parameters):
        parameter = _local(parameters, placed)
        full = [checkpoint.tensor(name) for name in placed.hf]
        rank, size = _shard_of(placed, processes)
        try:
            shard = take_shard(full, placed.layout, layout.arch, rank, size)
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


def _wanted(layout: ChunkLayout, processes: Processes, parameters: Parameters) -> list[PlacedTensor]:
    """The tensors that this process holds a shard of."""
    wanted = [
        placed
        for chunk in layout.chunks_of(processes.pipeline_rank)
        for placed in layout.tensors(chunk)
        if placed.expert is None or any(name in parameters for name in placed.megatron)
    ]
    if layout.arch.tied_embeddings and processes.is_last_stage and processes.pipeline_size > 1:
        # The last stage keeps its own copy of the tied embedding as its output layer.
        embedding = next(iter(layout.tensors(0)))
        wanted.append(PlacedTensor(("output_layer.weight",), embedding.hf, embedding.layout))
    return wanted


def _shard_of(placed: PlacedTensor, processes: Processes) -> tuple[int, int]:
    """Rank and number of the tensor-parallel shards of a parameter; experts have a tensor parallelism of their own."""
    if placed.expert is None:
        return processes.tensor_rank, processes.tensor_size
    group = parallel_state.get_expert_tensor_parallel_group()
    return group.rank(), group.size()


@dataclass(frozen=True)
class _Unit:
    """What is gathered together: one parameter, or the same parameter of one expert on every expert rank."""

    placed: tuple[PlacedTensor, ...]
    shape: tuple[int, ...]

    @property
    def is_expert(self) -> bool:
        return self.placed[0].expert is not None


class WeightGatherer:
    """Streams a replica's sharded weights as full tensors under their Hugging Face names to its leader."""

    def __init__(self, chunks: Sequence[torch.nn.Module], layout: ChunkLayout, processes: Processes) -> None:
        """Collective over the replica: stages tell each other the shapes of their shards once."""
        self._layout = layout
        self._processes = processes
        self._parameters = named_parameters(chunks, layout, processes)
        self._dtype = next(iter(self._parameters.values())).dtype
        self._expert_tensor_size = parallel_state.get_expert_tensor_parallel_world_size()
        mine = {chunk: self._shapes(chunk) for chunk in layout.chunks_of(processes.pipeline_rank)}
        everyones: list[Any] = [None] * processes.pipeline_size
        dist.all_gather_object(everyones, mine, group=parallel_state.get_pipeline_model_parallel_group())
        self._units = [
            [
                _Unit(placed, shape)
                for placed, shape in zip(self._placed(chunk), everyones[owner_of(chunk, layout)][chunk], strict=True)
            ]
            for chunk in range(layout.num_chunks)
        ]
        # Expert shards are gathered by every process of their group, where any of them leads a stage of a replica.
        ranks = dist.get_process_group_ranks(parallel_state.get_expert_tensor_and_model_parallel_group())
        self._gathers_experts = any(rank % (processes.tensor_size * processes.context_size) == 0 for rank in ranks)

    def _placed(self, chunk: int) -> list[tuple[PlacedTensor, ...]]:
        """Parameters of a chunk; an expert's together with those that take its place on the other expert ranks."""
        tensors = list(self._layout.tensors(chunk))
        alone: list[tuple[PlacedTensor, ...]] = [(placed,) for placed in tensors if placed.expert is None]
        experts = [placed for placed in tensors if placed.expert is not None]
        if not experts:
            return alone
        assert self._layout.arch.experts
        number = self._layout.arch.experts.number
        here = number // self._processes.expert_size
        # `experts` lists all experts of one parameter, then all of the next.
        together = [
            tuple(experts[start + slot : start + number : here])
            for start in range(0, len(experts), number)
            for slot in range(here)
        ]
        return alone + together

    def _shapes(self, chunk: int) -> list[tuple[int, ...]]:
        return [tuple(self._mine(placed).shape) for placed in self._placed(chunk)]

    def _mine(self, placed: tuple[PlacedTensor, ...]) -> torch.nn.Parameter:
        return _local(self._parameters, placed[self._processes.expert_rank if len(placed) > 1 else 0])

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors in buckets of at most `bucket_bytes` (or one parameter, if that is larger).

        A collective: all processes must iterate to the end in step. Buckets come chunk by chunk, dense parameters
        before experts; they are filled on the replicas' leaders and empty on the other processes.
        """
        for chunk, units in enumerate(self._units):
            owner = owner_of(chunk, self._layout)
            pending: list[_Unit] = []
            size = 0
            for unit in units:
                nbytes = math.prod(unit.shape) * self._dtype.itemsize * self._num_shards(unit)
                if pending and (size + nbytes > bucket_bytes or unit.is_expert != pending[0].is_expert):
                    yield self._gather(pending, owner)
                    pending, size = [], 0
                pending.append(unit)
                size += nbytes
            yield self._gather(pending, owner)

    def _num_shards(self, unit: _Unit) -> int:
        return len(unit.placed) * self._expert_tensor_size if unit.is_expert else self._processes.tensor_size

    def _gather(self, pending: list[_Unit], owner: int) -> list[tuple[str, Tensor]]:
        """One bucket: shards to the owning stage's first process, from there to the leader."""
        me = self._processes
        stacked = torch.empty(0)
        if me.pipeline_rank == owner:
            flat = torch.cat([self._mine(unit.placed).detach().flatten() for unit in pending])
            if pending[0].is_expert:
                stacked = self._gather_experts(flat)
            elif me.context_rank == 0:
                stacked = _gather_to_first(flat, me)
        if owner != 0 and me.tensor_rank == 0 and me.context_rank == 0:
            ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
            if me.pipeline_rank == owner:
                dist.send(stacked, ranks[0])
            elif me.pipeline_rank == 0:
                numel = sum(math.prod(unit.shape) for unit in pending)
                stacked = torch.empty(self._num_shards(pending[0]), numel, dtype=self._dtype, device=me.device)
                dist.recv(stacked, ranks[owner])
        return self._merged(pending, stacked) if me.is_leader else []

    def _gather_experts(self, flat: Tensor) -> Tensor:
        """[expert ranks x expert tensor ranks, n] where the group leads a replica's stage, else empty."""
        if not self._gathers_experts:
            return torch.empty(0)
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        stacked = flat.new_empty(group.size(), len(flat))
        dist.all_gather_into_tensor(stacked.view(-1), flat, group=group)
        return stacked

    def _merged(self, pending: list[_Unit], stacked: Tensor) -> list[tuple[str, Tensor]]:
        named: list[tuple[str, Tensor]] = []
        start = 0
        for unit in pending:
            end = start + math.prod(unit.shape)
            shards = [row[start:end].view(unit.shape) for row in stacked]
            per_tensor = len(shards) // len(unit.placed)
            for i, placed in enumerate(unit.placed):
                mine = shards[i * per_tensor : (i + 1) * per_tensor]
                named.extend(zip(placed.hf, merge_shards(mine, placed.layout, self._layout.arch), strict=True))
            start = end
        return named


def owner_of(chunk: int, layout: ChunkLayout) -> int:
    """The pipeline stage that holds a chunk."""
    return chunk % layout.pipeline_size


def _gather_to_first(flat: Tensor, processes: Processes) -> Tensor:
    """[tp, n] on tensor rank 0, empty elsewhere."""
    if processes.tensor_size == 1:
        return flat[None]
    group = parallel_state.get_tensor_model_parallel_group()
    first = processes.tensor_rank == 0
    stacked = torch.empty(processes.tensor_size if first else 0, len(flat), dtype=flat.dtype, device=flat.device)
    dist.gather(flat, list(stacked.unbind()) if first else None, dst=dist.get_global_rank(group, 0), group=group)
    return stacked
