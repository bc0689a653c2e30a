"""Qwen3.5, 3.6, dense: Qwen3-Next's layers with an MLP, other names of projections, inside a vision model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import MTP_APART, ModelFamily
from dapo_mega.models.qwen3_next import DEFAULTS, hybrid_sizes

ATTENTION = rules.hybrid_attention(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))


def _read(raw: Mapping[str, Any]) -> Architecture:
    return Architecture(**hybrid_sizes(raw, {**DEFAULTS, "num_key_value_heads": 4}))


FAMILY = ModelFamily(
    model_type="qwen3_5_text",
    read=_read,
    per_layer=(*ATTENTION, rules.MLP_NORM, *rules.DENSE_MLP),
    mtp=MTP_APART,
    has_token_classifier=False,
    class_prefix="Qwen3_5",
)
