"""Llama 2 and 3: no biases unless the model asks for them, RMSNorm, SwiGLU, Llama 3.1's rope scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import attention_biases, common_sizes

_DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 2048}


def _read(raw: Mapping[str, Any]) -> Architecture:
    return Architecture(
        **common_sizes(raw, _DEFAULTS),
        **attention_biases(raw),
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


FAMILY = ModelFamily(
    model_type="llama",
    read=_read,
    per_layer=(*rules.ATTENTION, rules.MLP_NORM, *rules.DENSE_MLP),
)
