"""OLMo-2: norms behind attention and MLP in place of those before them, and over all heads of queries and of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import attention_biases, common_sizes

_DEFAULTS = {"num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

PER_LAYER = (*rules.ATTENTION, *rules.NORMS_BEHIND, *rules.DENSE_MLP)


def read(raw: Mapping[str, Any], **others: Any) -> Architecture:
    """The architecture of a `config.json`; `others` are the fields in which OLMo-3 differs."""
    return Architecture(
        **common_sizes(raw, _DEFAULTS),
        **attention_biases(raw),
        qk_norm=True,
        qk_norm_over_heads=True,
        norms="behind",
        **others,
    )


FAMILY = ModelFamily(model_type="olmo2", read=read, per_layer=PER_LAYER, has_token_classifier=False)
