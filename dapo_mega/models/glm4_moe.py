"""GLM-4.5 and later mixtures: half of each head is rotated, norms on q and k optional, DeepSeek-V3's routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models import deepseek
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.deepseek_v3 import sigmoid_routing
from dapo_mega.models.families import MTP_AS_LAST_LAYER, ModelFamily
from dapo_mega.models.hf_sizes import common_sizes

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**_DEFAULTS, **raw}
    return Architecture(
        **common_sizes(raw, _DEFAULTS),
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=bool(raw.get("use_qk_norm", False)),
        experts=deepseek.read_experts(raw, **sigmoid_routing(raw)),
    )


FAMILY = ModelFamily(
    model_type="glm4_moe",
    read=_read,
    per_layer=(*rules.ATTENTION, *deepseek.MLP),
    mtp=MTP_AS_LAST_LAYER,
    has_token_classifier=False,
)
