"""Qwen2 and Qwen2.5 (dense): biases on q, k, v only, RMSNorm, SwiGLU, grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import common_sizes

_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}


def _read(raw: Mapping[str, Any]) -> Architecture:
    return Architecture(**common_sizes(raw, _DEFAULTS), qkv_bias=True)


FAMILY = ModelFamily(
    model_type="qwen2",
    read=_read,
    per_layer=(*rules.ATTENTION, rules.MLP_NORM, *rules.DENSE_MLP),
)
