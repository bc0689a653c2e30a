"""Loads this rank's shards from a checkpoint, by the model family's table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from dapo_mega.config import ParallelConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.core.groups import expert_tensor_group
from dapo_mega.megatron.core.layers import is_fp8
from dapo_mega.models import Architecture, ModelFamily, take_shard
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.hf_checkpoint import TensorSource, check_source

_LARGEST_E4M3: Final = 448.0
"""The format of weights in both of compute.fp8.format."""


@dataclass(frozen=True)
class ChunkLayout:
    """The layers of each model chunk. Chunk c is on stage c % pipeline_size; interleaved stages hold several chunks, in
    the order in which a token passes through them."""

    family: ModelFamily
    arch: Architecture
    parallel: ParallelConfig

    @property
    def pipeline_size(self) -> int:
        return self.parallel.pipeline

    @property
    def num_chunks(self) -> int:
        return self.parallel.num_chunks

    def chunks_of(self, stage: int) -> range:
        return range(stage, self.num_chunks, self.pipeline_size)

    def layers(self, chunk: int) -> range:
        return self.parallel.chunk_layers(self.arch.num_layers)[chunk]

    def tensors(self, chunk: int) -> Iterator[PlacedTensor]:
        return self.family.tensors(self.arch, self.layers(chunk), chunk == 0, chunk == self.num_chunks - 1)


def owner_of(chunk: int, layout: ChunkLayout) -> int:
    """The pipeline stage that holds a chunk."""
    return chunk % layout.pipeline_size


Parameters = dict[str, Tensor]


def named_parameters(chunks: Sequence[torch.nn.Module], layout: ChunkLayout, processes: Processes) -> Parameters:
    """Parameters of this rank's stages by name, with global layer and expert numbers; and the router biases, which
    are buffers, if the family's checkpoints have them."""
    experts_here = layout.arch.experts.number // processes.expert_size if layout.arch.experts else 0
    first_expert = experts_here * processes.expert_rank
    parameters = {}
    for chunk, module in zip(layout.chunks_of(processes.pipeline_rank), chunks, strict=True):
        for name, parameter in chain(module.named_parameters(), _router_biases(module, layout.arch)):
            name = _renumbered(_LAYER_NUMBER, name, layout.layers(chunk).start)
            parameters[_renumbered(_EXPERT_NUMBER, name, first_expert)] = parameter
    return parameters


def _router_biases(module: torch.nn.Module, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    if arch.experts and arch.experts.has_router_bias:
        yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(".router.expert_bias"))


_LAYER_NUMBER = re.compile(r"(?<=^decoder\.layers\.)\d+")
# `experts.local_experts.3.linear_fc1.weight` in local layers, `experts.linear_fc1.weight3` (or bias3) in grouped ones,
# whose adapters are `experts.linear_fc1.lora.3.B`.
_EXPERT_NUMBER = re.compile(
    r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$|(?<=\.experts\.linear_fc[12]\.bias)\d+$"
    r"|(?<=\.experts\.linear_fc[12]\.lora\.)\d+"
)


def _renumbered(number: re.Pattern[str], name: str, first: int) -> str:
    return number.sub(lambda found: str(int(found[0]) + first), name)


def local_parameter(parameters: Parameters, placed: PlacedTensor) -> Tensor:
    """The entry of `named_parameters` that holds this rank's shard of `placed`."""
    return next(parameters[name] for name in placed.megatron if name in parameters)


def load_weights(
    chunks: Sequence[torch.nn.Module], checkpoint: TensorSource, layout: ChunkLayout, processes: Processes
) -> None:
    """Load this rank's shards from a checkpoint: Hugging Face's, or Megatron's in any layout.

    Reads only the shards from a Hugging Face checkpoint, and whole parameters of the stage from a Megatron one. Raises
    InputError that names missing or additional tensors and those of another shape.
    """
    check_source(checkpoint, layout.family, layout.arch)
    fill_parameters(named_parameters(chunks, layout, processes), checkpoint, layout, processes)


class _Tensors(Protocol):
    def tensor(self, name: str) -> Tensor: ...


def fill_parameters(parameters: Parameters, source: _Tensors, layout: ChunkLayout, processes: Processes) -> None:
    """Give this rank's parameters, all of which are tensors of the layout, their shards of what the source has."""
    filled = set()
    for placed in _wanted(layout, processes, parameters):
        parameter = local_parameter(parameters, placed)
        full = [source.tensor(name) for name in placed.hf]
        rank, size = shard_of(placed, processes)
        shard = take_shard(full, placed.layout, layout.arch, rank, size)
        assert shard.shape == parameter.shape, placed
        with torch.no_grad():
            if is_fp8(parameter):
                _prepare_fp8(parameter, shard)
            parameter.copy_(shard)
        filled.add(id(parameter))
    unfilled = [name for name, parameter in parameters.items() if id(parameter) not in filled]
    assert not unfilled, f"parameters without a rule: {unfilled}"


def _prepare_fp8(parameter: Any, shard: Tensor) -> None:
    """Before an FP8 parameter gets its values: what else is made of them."""
    # The optimizer makes its float32 weights of these.
    if hasattr(parameter, "get_high_precision_init_val"):
        parameter.get_high_precision_init_val().copy_(shard)
    # Delayed scaling has no scale before the first update; with 1, small weights would be rounded to 0.
    quantizer = parameter._quantizer
    if type(quantizer).__name__ == "Float8Quantizer" and bool(shard.any()):
        quantizer.scale.copy_(_LARGEST_E4M3 / shard.abs().max())


def _wanted(layout: ChunkLayout, processes: Processes, parameters: Parameters) -> list[PlacedTensor]:
    """The tensors of which this rank holds a shard."""
    wanted = [
        placed
        for chunk in layout.chunks_of(processes.pipeline_rank)
        for placed in layout.tensors(chunk)
        if placed.expert is None or any(name in parameters for name in placed.megatron)
    ]
    if "output_layer.weight" in parameters and layout.arch.tied_embeddings and processes.pipeline_size > 1:
        # The last stage keeps its own copy of the tied embedding as its output layer.
        embedding = next(iter(layout.tensors(0)))
        wanted.append(PlacedTensor(("output_layer.weight",), embedding.hf, embedding.layout))
    return wanted


def shard_of(placed: PlacedTensor, processes: Processes) -> tuple[int, int]:
    """(rank, size) of the tensor parallelism of a parameter, which is separate for experts."""
    if placed.expert is None:
        return processes.tensor_rank, processes.tensor_size
    group = expert_tensor_group()
    return group.rank(), group.size()
