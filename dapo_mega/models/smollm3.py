"""SmolLM3: Llama's layers, some of them without rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily
from dapo_mega.models.hf_sizes import attention_biases, common_sizes
from dapo_mega.models.llama import FAMILY as LLAMA

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


def _read(raw: Mapping[str, Any]) -> Architecture:
    sizes = common_sizes(raw, _DEFAULTS)
    layers = range(sizes["num_layers"])
    interval = raw.get("no_rope_layer_interval", 4)
    listed = raw.get("no_rope_layers")
    rotates = [(layer + 1) % interval for layer in layers] if listed is None else listed
    if len(rotates) < len(layers):
        raise InputError(f"no_rope_layers has {len(rotates)} numbers for {len(layers)} layers; correct it")
    return Architecture(
        **sizes,
        **attention_biases(raw),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        unrotated_layers=frozenset(layer for layer in layers if not rotates[layer]),
    )


FAMILY = ModelFamily(model_type="smollm3", read=_read, per_layer=LLAMA.per_layer, class_prefix="SmolLM3")
