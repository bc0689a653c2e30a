"""The layer spec is the only switch between GPU and CPU: Transformer Engine layers, or Megatron's local ones
with our RMSNorm and our packed attention. Both take the same packed micro-batches."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from dapo_mega.config import ModelConfig
from dapo_mega.errors import InputError


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm. Megatron's WrappedTorchNorm refuses sequence parallelism; this one marks its weight
    so that Megatron sums the weight's gradient over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        # In float32 and with the weight applied after the cast back, as transformers does it.
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


@dataclass(frozen=True)
class SegmentBucket:
    """Segments of similar length, right-padded to one [n, L] block: `gather` holds packed positions, flat."""

    gather: Tensor
    shape: tuple[int, int]
    valid: Tensor


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters with the attention plan of the CPU, made once per micro-batch."""

    buckets: tuple[SegmentBucket, ...] = ()
    restore: Tensor | None = None


def packed_segments(cu_seqlens: Tensor, max_seqlen: int, *, plan_attention: bool) -> PackedSegments:
    """Describe one packed micro-batch to the layers; `plan_attention` prepares `PackedAttention`'s gathering."""
    buckets: list[SegmentBucket] = []
    restore = None
    if plan_attention:
        starts = cu_seqlens[:-1].long()
        lengths = cu_seqlens.diff().long()
        order = torch.argsort(lengths, descending=True, stable=True)
        packed_order = []
        position = 0
        while position < len(order):
            longest = int(lengths[order[position]])
            # A block wastes at most a third of its rows' attention on padding.
            members = order[position:][lengths[order[position:]] * 3 >= longest * 2]
            offsets = torch.arange(longest, device=starts.device)
            valid = offsets[None] < lengths[members][:, None]
            gather = starts[members][:, None] + torch.where(valid, offsets[None], 0)
            buckets.append(SegmentBucket(gather.flatten(), (len(members), longest), valid.flatten().nonzero()[:, 0]))
            packed_order.append(gather[valid])
            position += len(members)
        restore = torch.argsort(torch.cat(packed_order))
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        buckets=tuple(buckets),
        restore=restore,
    )


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed sequences [T, heads, head_dim] with torch's fused kernels.

    Segments of similar length are padded on the right into one block; under a causal mask no real position
    sees the padding behind it, so the result is exact.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        if config.context_parallel_size > 1:
            raise InputError("context parallelism needs Transformer Engine layers in this version")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor:
        """[T, heads * head_dim] from query [T, heads, d] and key, value [T, groups, d]."""
        assert packed_seq_params is not None
        assert packed_seq_params.restore is not None
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for bucket in packed_seq_params.buckets:
            q, k, v = (_blocks(tensor, bucket) for tensor in (query, key, value))
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            outputs.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.valid))
        return torch.cat(outputs).index_select(0, packed_seq_params.restore).flatten(1)


def _blocks(tensor: Tensor, bucket: SegmentBucket) -> Tensor:
    """[n, heads, L, d] from packed [T, heads, d]."""
    return tensor.index_select(0, bucket.gather).unflatten(0, bucket.shape).transpose(1, 2)


def uses_transformer_engine(config: ModelConfig) -> bool:
    """Whether this machine gets Transformer Engine layers; refuses them where they cannot run."""
    available = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if config.layer_implementation == "transformer_engine" and not available:
        raise InputError(
            "model.layer_implementation=transformer_engine needs a CUDA device and the transformer-engine package; "
            "install it or set model.layer_implementation=local"
        )
    return available and config.layer_implementation != "local"


def block_spec(config: TransformerConfig, transformer_engine: bool) -> TransformerBlockSubmodules | ModuleSpec:
    """Layers of this pipeline stage."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
