"""Computes the bytes of parameters, gradients and optimizer state, as Megatron's DDP and distributed optimizer store
them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig, ParallelConfig
from dapo_mega.planning.adapters import adapter_numels
from dapo_mega.planning.rank_layout import Chunk, RankLayout

if TYPE_CHECKING:
    from dapo_mega.models import Architecture
    from dapo_mega.models.architecture import Experts, GatedDelta

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
    """Bytes that one process holds of one or several chunks."""

    parameters: int
    gradients: int
    optimizer: int

    def __add__(self, other: ParameterBytes) -> ParameterBytes:
        return ParameterBytes(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def num_parameters(arch: Architecture) -> int:
    """Weights of the whole policy, embeddings included."""
    dense, experts = _whole_model(arch)
    return dense + experts


def num_mtp_parameters(arch: Architecture) -> int:
    """Weights of the layer of multi-token prediction that is trained."""
    whole, chunk = RankLayout(arch, ParallelConfig(), 1), Chunk(range(arch.num_layers), True, True)
    return sum(dense_numels(whole, chunk)) + sum(expert_numels(whole, chunk)) - num_parameters(arch)


def num_active_parameters(arch: Architecture) -> int:
    """Weights that one token meets: of a mixture of experts only the chosen ones."""
    dense, experts = _whole_model(arch)
    return dense + (experts * arch.experts.per_token // arch.experts.number if arch.experts else 0)


@cache
def _whole_model(arch: Architecture) -> tuple[int, int]:
    """Weights outside experts, and of all experts together."""
    whole, chunk = RankLayout(arch, ParallelConfig(), 1).of_policy_alone, Chunk(range(arch.num_layers), True, True)
    return sum(dense_numels(whole, chunk)), sum(expert_numels(whole, chunk))


def stage_bytes(
    placement: RankLayout, stage: int, model: ModelConfig, compute: ComputeConfig, lora: LoraConfig | None = None
) -> ParameterBytes:
    """Parameters, gradients and optimizer state of one process of a pipeline stage."""
    dense, experts = stage_buffers(placement, stage, model, compute, lora)
    frozen = 0
    for chunk in placement.chunks(stage) if lora else ():
        frozen += sum(dense_numels(placement, chunk)) + sum(expert_numels(placement, chunk))
    return dense + experts + ParameterBytes(frozen * DTYPE_BYTES[model.dtype], 0, 0)


def stage_buffers(
    placement: RankLayout, stage: int, model: ModelConfig, compute: ComputeConfig, lora: LoraConfig | None = None
) -> tuple[ParameterBytes, ParameterBytes]:
    """Like `stage_bytes`, of what is trained, in two parts: parameters that data x context parallel ranks share, and
    spread experts."""
    shared, spread = ParameterBytes(0, 0, 0), ParameterBytes(0, 0, 0)
    for chunk in placement.chunks(stage):
        if lora:
            dense, experts = adapter_numels(placement, chunk, lora)
        else:
            dense, experts = dense_numels(placement, chunk), expert_numels(placement, chunk)
        if not placement.has_spread_experts:
            dense, experts = dense + experts, []
        shared += _buffer_bytes(dense, placement.optimizer_shards, model, compute)
        spread += _buffer_bytes(experts, placement.expert_shards, model, compute)
    return shared, spread


def dense_numels(placement: RankLayout, chunk: Chunk) -> list[int]:
    """Elements of each parameter of a chunk on one process, experts left out."""
    arch, delta = placement.arch, placement.arch.gated_delta
    norms = [arch.hidden_size] * _num_norms(arch)
    attention = [*norms, *attention_matrices(placement), *_attention_vectors(placement)]
    rule = [*norms, *delta_matrices(placement, delta), *_delta_vectors(placement, delta)] if delta else []
    mlp, routing = _mlp_numels(placement), _routing_numels(placement, arch.experts) if arch.experts else []
    numels: list[int] = []
    for layer in chunk_layers(placement, chunk):
        numels += rule if arch.has_delta(layer) else attention
        numels += routing if arch.experts and arch.has_experts(layer) else mlp
    embedding = placement.vocabulary * arch.hidden_size
    if chunk.is_first:
        numels.append(embedding)
    if chunk.is_last:
        numels.append(arch.hidden_size)
        if arch.has_value_head:
            numels.append(arch.hidden_size)
        elif not (arch.tied_embeddings and chunk.is_first):  # Tied weights of two stages are two copies.
            numels.append(embedding)
        if arch.trains_mtp:
            numels += [arch.hidden_size] * 3 + [mtp_projection(placement)]
    return numels


def chunk_layers(placement: RankLayout, chunk: Chunk) -> list[int]:
    """The layers of a chunk, and behind the last one that of multi-token prediction, if it is trained."""
    behind = [placement.arch.num_layers] if chunk.is_last and placement.arch.trains_mtp else []
    return [*chunk.layers, *behind]


def sent_embedding(placement: RankLayout, stage: int) -> int:
    """Elements of the first stage's embedding that a stage is sent for multi-token prediction."""
    arch, last = placement.arch, placement.parallel.pipeline - 1
    is_sent = arch.trains_mtp and not arch.tied_embeddings and stage == last > 0
    return is_sent * placement.vocabulary * arch.hidden_size


def mtp_projection(placement: RankLayout) -> int:
    """Elements on one process of the projection of embeddings and hidden states."""
    return 2 * placement.arch.hidden_size**2 // placement.parallel.tensor


def _num_norms(arch: Architecture) -> int:
    return 4 if arch.norms == "around" else 2


def attention_matrices(placement: RankLayout) -> list[int]:
    """Elements of the weights around a layer's attention on one process."""
    arch, hidden = placement.arch, placement.arch.hidden_size
    queries = placement.query_heads * arch.head_dim
    latent = arch.latent_attention
    if latent is None:
        return [placement.projection_rows * hidden, queries * hidden]
    up = placement.query_heads * (latent.unrotated_head_dim + latent.value_head_dim)
    matrices = [
        (latent.key_value_rank + latent.rotated_head_dim) * hidden,
        latent.key_value_rank * up,
        placement.query_heads * latent.value_head_dim * hidden,
    ]
    if latent.query_rank is None:
        return [*matrices, queries * hidden]
    return [*matrices, latent.query_rank * hidden, queries * latent.query_rank]


def delta_matrices(placement: RankLayout, delta: GatedDelta) -> list[int]:
    """Elements of the weights around a layer's gated delta rule on one process."""
    hidden, size = placement.arch.hidden_size, placement.parallel.tensor
    return [sum(delta.sections) * hidden // size, delta.value_width * hidden // size]


def _delta_vectors(placement: RankLayout, delta: GatedDelta) -> list[int]:
    """Elements of the convolution, of the decays' two vectors and of the norm within a gated delta layer."""
    tensor = placement.parallel.tensor
    heads = delta.num_value_heads // tensor
    return [sum(delta.sections[:3]) * delta.conv_kernel // tensor, heads, heads, delta.value_head_dim]


def _attention_vectors(placement: RankLayout) -> list[int]:
    """Elements of the biases and norms within a layer's attention."""
    arch, latent = placement.arch, placement.arch.latent_attention
    vectors = [latent.key_value_rank, latent.query_rank or 0] if latent else []
    if arch.qkv_bias:
        vectors.append(placement.projection_rows)
    if arch.qk_norm:
        heads = (placement.query_heads, placement.key_heads) if arch.qk_norm_over_heads else (1, 1)
        vectors += [arch.head_dim * number for number in heads]
    if arch.output_bias:
        vectors.append(arch.hidden_size)
    if arch.attention_sinks:
        vectors.append(placement.query_heads)
    return vectors


def _mlp_numels(placement: RankLayout) -> list[int]:
    inner = placement.arch.ffn_hidden_size // placement.parallel.tensor
    numels = [2 * inner * placement.arch.hidden_size, inner * placement.arch.hidden_size]
    return [*numels, 2 * inner, placement.arch.hidden_size] if placement.arch.mlp_bias else numels


def _routing_numels(placement: RankLayout, experts: Experts) -> list[int]:
    """The router and the shared expert."""
    hidden = placement.arch.hidden_size
    numels = [experts.number * hidden] + [experts.number] * experts.has_biases
    if experts.shared_ffn_hidden_size:
        inner = experts.shared_ffn_hidden_size // placement.parallel.tensor
        numels += [2 * inner * hidden, inner * hidden]
    return [*numels, hidden] if experts.gates_shared else numels


def expert_numels(placement: RankLayout, chunk: Chunk) -> list[int]:
    """Elements of each weight and bias of experts of a chunk on one process."""
    experts, parallel = placement.arch.experts, placement.parallel
    if experts is None:
        return []
    inner, hidden = experts.ffn_hidden_size // parallel.expert_tensor, placement.arch.hidden_size
    one = [2 * inner * hidden, inner * hidden] + [2 * inner, hidden] * experts.has_biases
    layers = sum(map(placement.arch.has_experts, chunk_layers(placement, chunk)))
    return one * (experts.number // parallel.expert * layers)


def linear_elements(placement: RankLayout, layer: int) -> int:
    """Elements of the weights of a transformer layer's linear layers, which FP8 applies to."""
    arch, chunk = placement.arch, Chunk(range(layer, layer + 1), is_first=False, is_last=False)
    vectors = _num_norms(arch) * arch.hidden_size
    if arch.gated_delta and arch.has_delta(layer):
        vectors += sum(_delta_vectors(placement, arch.gated_delta))
    if arch.experts and arch.has_experts(layer):
        vectors += (arch.experts.number + arch.experts.gates_shared) * arch.hidden_size
    return sum(dense_numels(placement, chunk)) - vectors + sum(expert_numels(placement, chunk))


def fp8_elements(placement: RankLayout, stage: int, compute: ComputeConfig) -> tuple[int, int]:
    """Elements of a stage's weights that are in FP8, on one process: of those that data x context parallel ranks share,
    and of spread experts."""
    if not compute.fp8.enabled:
        return 0, 0
    ends = compute.fp8.bf16_layers_at_ends
    inner, behind = range(ends, placement.arch.num_layers - ends), placement.arch.num_layers
    held = (layer for chunk in placement.chunks(stage) for layer in chunk_layers(placement, chunk))
    layers = [layer for layer in held if layer in inner or layer == behind]
    elements = sum(linear_elements(placement, layer) for layer in layers)
    elements += mtp_projection(placement) * (behind in layers)
    spread = 0
    if placement.has_spread_experts:
        chunks = [Chunk(range(layer, layer + 1), is_first=False, is_last=False) for layer in layers]
        spread = sum(sum(expert_numels(placement, chunk)) for chunk in chunks)
    return elements - spread, spread


def fp8_weight_bytes(placement: RankLayout, stage: int, compute: ComputeConfig) -> int:
    """How FP8 changes a stage's parameter bytes: copies added to the bf16 weights, or replacing them."""
    elements = sum(fp8_elements(placement, stage, compute))
    return elements * (_FP8_WEIGHT_BYTES - (DTYPE_BYTES["bf16"] if compute.fp8.params else 0))


def _buffer_bytes(numels: list[int], shards: int, model: ModelConfig, compute: ComputeConfig) -> ParameterBytes:
    if not numels:
        return ParameterBytes(0, 0, 0)
    elements = sum(_padded(numel, _PARAMETER_ALIGNMENT) for numel in numels)
    elements = _padded(elements, math.lcm(shards, _BUCKET_ALIGNMENT))
    # Float32 weights are their own main weights. Megatron keeps main weights on the device when it offloads, too.
    moments = _MOMENT_BYTES * (1.0 - compute.optimizer_offload)
    per_element = moments + (_MAIN_WEIGHT_BYTES if model.dtype == "bf16" else 0)
    return ParameterBytes(
        elements * DTYPE_BYTES[model.dtype],
        elements * _GRADIENT_BYTES,
        round(elements // shards * per_element),
    )


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
