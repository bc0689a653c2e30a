"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): biases on q, k, v, and a gated shared expert beside the routed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture, Experts
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import common_sizes, sparse_dense_layers

_DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**_DEFAULTS, **raw}
    sizes = common_sizes(raw, {})
    return Architecture(
        **sizes,
        qkv_bias=bool(raw.get("qkv_bias", True)),
        experts=Experts(
            number=raw["num_experts"],
            per_token=raw["num_experts_per_tok"],
            ffn_hidden_size=raw["moe_intermediate_size"],
            normalised=bool(raw.get("norm_topk_prob", False)),
            shared_ffn_hidden_size=raw["shared_expert_intermediate_size"],
            gates_shared=True,
            dense_layers=sparse_dense_layers(raw, sizes["num_layers"]),
        ),
    )


FAMILY = ModelFamily(
    model_type="qwen2_moe",
    read=_read,
    per_layer=(
        *rules.ATTENTION,
        rules.MLP_NORM,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        *rules.shared_expert("shared_expert"),
    ),
)
