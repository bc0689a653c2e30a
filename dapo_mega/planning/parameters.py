"""Bytes of parameters, gradients and optimizer state, as Megatron's DDP and distributed optimizer lay them out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_mega.config import ComputeConfig, ModelConfig
from dapo_mega.planning.placement import Chunk, Placement

if TYPE_CHECKING:
    from dapo_mega.models import Architecture

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
_GRADIENT_BYTES = 4
_MOMENT_BYTES = 8
_MAIN_WEIGHT_BYTES = 4
# Elements at whose multiples parameters and buckets begin in Megatron's buffers.
_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
# FP8 products on Hopper want each weight twice, as it is and transposed.
_FP8_WEIGHT_BYTES = 2


@dataclass(frozen=True)
class ParameterBytes:
    """What one process holds of one or several chunks, in bytes."""

    parameters: int
    gradients: int
    optimizer: int

    def __add__(self, other: ParameterBytes) -> ParameterBytes:
        return ParameterBytes(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def num_parameters(arch: Architecture) -> int:
    """Weights of the whole model, embeddings included."""
    return arch.num_layers * _layer_parameters(arch, arch.experts.number if arch.experts else 0) + _end_parameters(arch)


def num_active_parameters(arch: Architecture) -> int:
    """Weights that one token meets: of a mixture of experts only the chosen ones."""
    chosen = arch.experts.per_token if arch.experts else 0
    return arch.num_layers * _layer_parameters(arch, chosen) + _end_parameters(arch)


def _layer_parameters(arch: Architecture, experts: int) -> int:
    heads, groups = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
    attention = arch.hidden_size * (2 * heads + 2 * groups) + arch.qkv_bias * (heads + 2 * groups)
    attention += 2 * arch.head_dim * arch.qk_norm
    if arch.experts:
        mlp = arch.hidden_size * (arch.experts.number + 3 * arch.experts.ffn_hidden_size * experts)
    else:
        mlp = 3 * arch.hidden_size * arch.ffn_hidden_size
    return attention + mlp + 2 * arch.hidden_size


def _end_parameters(arch: Architecture) -> int:
    return arch.vocab_size * arch.hidden_size * (1 if arch.tied_embeddings else 2) + arch.hidden_size


def stage_bytes(placement: Placement, stage: int, model: ModelConfig, compute: ComputeConfig) -> ParameterBytes:
    """Parameters, gradients and optimizer state of one process of a pipeline stage."""
    dense, experts = stage_buffers(placement, stage, model, compute)
    return dense + experts


def stage_buffers(
    placement: Placement, stage: int, model: ModelConfig, compute: ComputeConfig
) -> tuple[ParameterBytes, ParameterBytes]:
    """The same in two parts: what data x context parallel processes share, and experts spread over processes."""
    shared, spread = ParameterBytes(0, 0, 0), ParameterBytes(0, 0, 0)
    for chunk in placement.chunks(stage):
        dense, experts = dense_numels(placement, chunk), expert_numels(placement, chunk)
        if not placement.has_spread_experts:
            dense, experts = dense + experts, []
        shared += _buffer_bytes(dense, placement.optimizer_shards, model, compute)
        spread += _buffer_bytes(experts, placement.expert_shards, model, compute)
    return shared, spread


def dense_numels(placement: Placement, chunk: Chunk) -> list[int]:
    """Elements of each parameter of a chunk on one process, experts left out."""
    arch, tensor = placement.arch, placement.parallel.tensor
    hidden = arch.hidden_size
    queries, keys = placement.query_heads * arch.head_dim, placement.key_heads * arch.head_dim
    layer = [hidden, (queries + 2 * keys) * hidden, queries * hidden, hidden]
    if arch.qkv_bias:
        layer.append(queries + 2 * keys)
    if arch.qk_norm:
        layer += [arch.head_dim, arch.head_dim]
    if arch.experts:
        layer.append(arch.experts.number * hidden)
    else:
        layer += [2 * arch.ffn_hidden_size // tensor * hidden, arch.ffn_hidden_size // tensor * hidden]
    embedding = placement.vocabulary * hidden
    ends = [embedding] if chunk.is_first else []
    if chunk.is_last:
        # Tied weights of two stages are two copies.
        ends += [hidden] if arch.tied_embeddings and chunk.is_first else [hidden, embedding]
    return layer * chunk.num_layers + ends


def expert_numels(placement: Placement, chunk: Chunk) -> list[int]:
    """Elements of each expert weight of a chunk on one process."""
    experts, parallel = placement.arch.experts, placement.parallel
    if experts is None:
        return []
    one = experts.ffn_hidden_size // parallel.expert_tensor * placement.arch.hidden_size
    return [2 * one, one] * (experts.number // parallel.expert * chunk.num_layers)


def linear_elements(placement: Placement, chunk: Chunk) -> int:
    """Elements of the weights of linear layers within the transformer layers, which FP8 applies to."""
    arch = placement.arch
    dense = sum(dense_numels(placement, Chunk(chunk.first_layer, chunk.num_layers, False, False)))
    vectors = 2 * arch.hidden_size + (arch.experts.number * arch.hidden_size if arch.experts else 0)
    return dense - vectors * chunk.num_layers + sum(expert_numels(placement, chunk))


def fp8_weight_bytes(placement: Placement, stage: int, compute: ComputeConfig) -> int:
    """Change of a stage's parameter bytes by FP8: copies beside the bf16 weights, or in their place."""
    if not compute.fp8.enabled:
        return 0
    ends = compute.fp8.bf16_layers_at_ends
    total = 0
    for chunk in placement.chunks(stage):
        inner = range(ends, placement.arch.num_layers - ends)
        num_fp8 = sum(i in inner for i in range(chunk.first_layer, chunk.first_layer + chunk.num_layers))
        share = linear_elements(placement, chunk) * num_fp8 // max(1, chunk.num_layers)
        total += share * (_FP8_WEIGHT_BYTES - (DTYPE_BYTES["bf16"] if compute.fp8.params else 0))
    return total


def _buffer_bytes(numels: list[int], shards: int, model: ModelConfig, compute: ComputeConfig) -> ParameterBytes:
    if not numels:
        return ParameterBytes(0, 0, 0)
    elements = sum(_padded(numel, _PARAMETER_ALIGNMENT) for numel in numels)
    elements = _padded(elements, math.lcm(shards, _BUCKET_ALIGNMENT))
    # Float32 weights are their own main weights.
    per_element = _MOMENT_BYTES + (_MAIN_WEIGHT_BYTES if model.dtype == "bf16" else 0)
    on_device = 1.0 - compute.optimizer_offload
    return ParameterBytes(
        elements * DTYPE_BYTES[model.dtype],
        elements * _GRADIENT_BYTES,
        round(elements // shards * per_element * on_device),
    )


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
