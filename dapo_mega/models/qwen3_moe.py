"""Qwen3-MoE: norms on queries and keys, optional attention biases, mixtures of experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture, Experts
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import attention_biases, common_sizes, sparse_dense_layers

_DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def _read(raw: Mapping[str, Any]) -> Architecture:
    sizes = common_sizes(raw, _DEFAULTS)
    # transformers 4 writes num_experts, transformers 5 num_local_experts.
    num_experts = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]
    return Architecture(
        **sizes,
        **attention_biases(raw),
        qk_norm=True,
        experts=Experts(
            number=num_experts,
            per_token=raw["num_experts_per_tok"],
            ffn_hidden_size=raw["moe_intermediate_size"],
            normalised=bool(raw.get("norm_topk_prob", False)),
            # Not in Qwen's own files; models grown from them may route as DeepSeek-V3 does, and this is its key.
            scores=raw.get("scoring_func", "softmax"),
            dense_layers=sparse_dense_layers(raw, sizes["num_layers"]),
        ),
    )


FAMILY = ModelFamily(
    model_type="qwen3_moe",
    read=_read,
    per_layer=(*rules.ATTENTION, rules.MLP_NORM, *rules.DENSE_MLP, *rules.EXPERTS),
)
