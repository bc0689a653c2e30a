"""Qwen3-Next: gated delta layers, every fourth layer gated attention; mixtures of experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture, Experts, GatedDelta
from dapo_mega.models.families import MTP_APART, ModelFamily
from dapo_mega.models.hf_sizes import attention_biases, common_sizes, full_attention_layers, sparse_dense_layers

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def hybrid_sizes(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Architecture` about everything but experts."""
    raw = {**defaults, **raw}
    attention = full_attention_layers(raw, raw.get("full_attention_interval") or 4, "linear_attention")
    return {
        **common_sizes({**raw, "layer_types": None}, defaults),
        **attention_biases(raw),
        "qk_norm": True,
        "output_gate": True,
        "zero_centred_norms": True,
        "gated_delta": GatedDelta(
            layers=frozenset(range(raw["num_hidden_layers"])) - attention,
            conv_kernel=raw["linear_conv_kernel_dim"],
            num_key_heads=raw["linear_num_key_heads"],
            num_value_heads=raw["linear_num_value_heads"],
            key_head_dim=raw["linear_key_head_dim"],
            value_head_dim=raw["linear_value_head_dim"],
        ),
    }


def shared_experts(raw: Mapping[str, Any], *, normalised: bool, dense_layers: frozenset[int]) -> Experts:
    """Experts with a gated shared one beside them."""
    return Experts(
        number=raw["num_experts"],
        per_token=raw["num_experts_per_tok"],
        ffn_hidden_size=raw["moe_intermediate_size"],
        normalised=normalised,
        shared_ffn_hidden_size=raw["shared_expert_intermediate_size"],
        gates_shared=True,
        dense_layers=dense_layers,
    )


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**DEFAULTS, **raw}
    dense = sparse_dense_layers(raw, raw["num_hidden_layers"])
    normalised = bool(raw.get("norm_topk_prob", True))
    experts = shared_experts(raw, normalised=normalised, dense_layers=dense)
    return Architecture(**hybrid_sizes(raw, DEFAULTS), experts=experts)


FAMILY = ModelFamily(
    model_type="qwen3_next",
    read=_read,
    per_layer=(
        *rules.hybrid_attention(("in_proj_qkvz", "in_proj_ba")),
        rules.MLP_NORM,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        *rules.shared_expert("shared_expert"),
    ),
    mtp=MTP_APART,
)
