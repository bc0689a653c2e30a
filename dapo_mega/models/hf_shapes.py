"""Computes the shapes of Hugging Face tensors from a model's sizes, to check a checkpoint before use."""

from __future__ import annotations

import re
from functools import cache

from dapo_mega.models.architecture import Architecture, Experts, GatedDelta, LatentAttention
from dapo_mega.models.families import Shapes, find_family

_NUMBERED = re.compile(r"(?<=\blayers)\.\d+|(?<=\bexperts)\.\d+")

_MTP_NORMS = (
    "enorm.weight",
    "hnorm.weight",
    "shared_head.norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
)


def hf_shape(name: str, arch: Architecture) -> tuple[int, ...]:
    """Shape of the tensor `name` of a rule's `hf` in a model of these sizes.

    KeyError names a tensor that neither this module nor the family's own `shapes` know.
    """
    parts = _NUMBERED.sub("", name).removeprefix("model.").removeprefix("mtp.")
    return _shapes(arch)[parts.removeprefix("layers.")]


@cache
def _shapes(arch: Architecture) -> Shapes:
    hidden = arch.hidden_size
    shapes = {
        "embed_tokens.weight": (arch.vocab_size, hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (arch.vocab_size, hidden),
        **_linear("score", 1, hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight": (hidden,),
        **_mlp("mlp", hidden, arch.ffn_hidden_size),
        **dict.fromkeys(_MTP_NORMS, (hidden,)),
        **dict.fromkeys(("eh_proj.weight", "fc.weight"), (hidden, 2 * hidden)),
    }
    if arch.latent_attention:
        shapes |= _latent_attention(arch, arch.latent_attention)
    else:
        shapes |= _attention(arch)
    if arch.experts:
        shapes |= _experts(hidden, arch.experts)
    if arch.gated_delta:
        shapes |= _gated_delta(hidden, arch.gated_delta)
    return {**shapes, **find_family(arch.model_type).shapes(arch)}


def _attention(arch: Architecture) -> Shapes:
    hidden, dim = arch.hidden_size, arch.head_dim
    queries, keys = arch.num_attention_heads * dim, arch.num_query_groups * dim
    return {
        **_linear("self_attn.q_proj", queries * (1 + arch.output_gate), hidden),
        **_linear("self_attn.k_proj", keys, hidden),
        **_linear("self_attn.v_proj", keys, hidden),
        **_linear("self_attn.o_proj", hidden, queries),
        "self_attn.q_norm.weight": (queries if arch.qk_norm_over_heads else dim,),
        "self_attn.k_norm.weight": (keys if arch.qk_norm_over_heads else dim,),
    }


def _latent_attention(arch: Architecture, latent: LatentAttention) -> Shapes:
    hidden, heads, rank = arch.hidden_size, arch.num_attention_heads, latent.key_value_rank
    queries = heads * (latent.unrotated_head_dim + latent.rotated_head_dim)
    shapes = {
        **_linear("self_attn.kv_a_proj_with_mqa", rank + latent.rotated_head_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        **_linear("self_attn.kv_b_proj", heads * (latent.unrotated_head_dim + latent.value_head_dim), rank),
        **_linear("self_attn.o_proj", hidden, heads * latent.value_head_dim),
    }
    if latent.query_rank is None:
        return {**shapes, **_linear("self_attn.q_proj", queries, hidden)}
    return {
        **shapes,
        **_linear("self_attn.q_a_proj", latent.query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (latent.query_rank,),
        **_linear("self_attn.q_b_proj", queries, latent.query_rank),
    }


def _experts(hidden: int, experts: Experts) -> Shapes:
    shapes = {
        "mlp.gate.weight": (experts.number, hidden),
        "mlp.gate.e_score_correction_bias": (experts.number,),
        **_mlp("mlp.experts", hidden, experts.ffn_hidden_size),
    }
    if experts.shared_ffn_hidden_size:
        # Qwen2-MoE has one shared expert with a gate, DeepSeek several that are stored as one.
        shapes |= _mlp("mlp.shared_expert", hidden, experts.shared_ffn_hidden_size)
        shapes |= _mlp("mlp.shared_experts", hidden, experts.shared_ffn_hidden_size)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _gated_delta(hidden: int, delta: GatedDelta) -> Shapes:
    keys, values, heads = delta.key_width, delta.value_width, delta.num_value_heads
    return {
        **_linear("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, hidden),
        **_linear("linear_attn.in_proj_ba", 2 * heads, hidden),
        **_linear("linear_attn.in_proj_qkv", 2 * keys + values, hidden),
        **_linear("linear_attn.in_proj_z", values, hidden),
        **_linear("linear_attn.in_proj_b", heads, hidden),
        **_linear("linear_attn.in_proj_a", heads, hidden),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, delta.conv_kernel),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (delta.value_head_dim,),
        **_linear("linear_attn.out_proj", hidden, values),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        **_linear(f"{prefix}.gate_proj", inner, hidden),
        **_linear(f"{prefix}.up_proj", inner, hidden),
        **_linear(f"{prefix}.down_proj", hidden, inner),
    }


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
