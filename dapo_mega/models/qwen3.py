"""Qwen3 (dense): norms on queries and keys, optional attention biases, RMSNorm, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import attention_biases, common_sizes

_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}


def _read(raw: Mapping[str, Any]) -> Architecture:
    return Architecture(**common_sizes(raw, _DEFAULTS), **attention_biases(raw), qk_norm=True)


FAMILY = ModelFamily(
    model_type="qwen3",
    read=_read,
    per_layer=(*rules.ATTENTION, rules.MLP_NORM, *rules.DENSE_MLP),
)
