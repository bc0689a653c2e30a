"""Gemma 3 for text: norms around attention and MLP that scale by 1 + weight, scaled embeddings, GELU, and sliding
windows with rotary frequencies of their own in most layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import attention_biases, common_sizes, full_attention_layers
from dapo_mega.models.rope import of_full_attention

_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**_DEFAULTS, **raw}
    if raw.get("use_bidirectional_attention"):
        raise InputError("gemma3_text with use_bidirectional_attention=true is not supported; take a causal model")
    of_full, theta = of_full_attention(raw, raw["rope_local_base_freq"])
    of_full |= {"layer_types": None, "hidden_act": raw["hidden_activation"]}
    return Architecture(
        **common_sizes(of_full, {}, ("gelu_pytorch_tanh",)),
        **attention_biases(raw),
        qk_norm=True,
        norms="around",
        zero_centred_norms=True,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(raw["hidden_size"]),
        attention_scale=raw["query_pre_attn_scalar"] ** -0.5,
        sliding_window=raw["sliding_window"],
        full_attention_layers=full_attention_layers(raw, raw["sliding_window_pattern"]),
        windowed_rope_theta=theta,
    )


FAMILY = ModelFamily(
    model_type="gemma3_text",
    read=_read,
    per_layer=(
        *rules.ATTENTION,
        *rules.NORMS_BEHIND,
        replace(rules.MLP_NORM, hf=(rules.HF_LAYER + "pre_feedforward_layernorm.weight",)),
        *rules.DENSE_MLP,
    ),
    class_prefix="Gemma3",
    has_token_classifier=False,
)
