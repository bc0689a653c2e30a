"""What the configurations of all Hugging Face families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError


def common_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Architecture` that every family writes alike. Raises KeyError for one that is missing."""
    if raw.get("use_sliding_window"):
        raise InputError("use_sliding_window=true is not supported; set it to false in config.json")
    heads = raw["num_attention_heads"]
    return {
        "model_type": raw["model_type"],
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": raw.get("num_key_value_heads", heads),
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "vocab_size": raw["vocab_size"],
        "max_positions": raw["max_position_embeddings"],
        "norm_epsilon": raw["rms_norm_eps"],
        "rope_theta": _unscaled_rope_theta(raw),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def _unscaled_rope_theta(raw: Mapping[str, Any]) -> float:
    """The base of the rotations; InputError for scaled ones."""
    # transformers 4 writes rope_theta and rope_scaling, transformers 5 one record rope_parameters.
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type != "default":
        raise InputError(
            f"rope scaling of type {rope_type!r} is not supported for {raw.get('model_type')}; only unscaled rope is"
        )
    return float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
