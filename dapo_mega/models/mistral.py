"""Mistral (7B, Nemo, Small): no biases, RMSNorm, SwiGLU, a sliding window unless `sliding_window` is null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import common_sizes

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}


def _read(raw: Mapping[str, Any]) -> Architecture:
    return Architecture(
        **common_sizes(raw, _DEFAULTS),
        qkv_bias=False,
        sliding_window=raw.get("sliding_window", 4096),
    )


FAMILY = ModelFamily(
    model_type="mistral",
    read=_read,
    per_layer=(*rules.ATTENTION, rules.MLP_NORM, *rules.DENSE_MLP),
)
