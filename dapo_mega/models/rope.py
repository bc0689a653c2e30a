"""Rotary position embeddings as Hugging Face configurations write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError


def unscaled_rope_theta(raw: Mapping[str, Any]) -> float:
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
