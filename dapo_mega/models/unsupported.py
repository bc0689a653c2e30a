"""Says of a model that no family computes which one is nearest, and what differs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_SPARSE = "attention to a chosen part of the tokens"
# Of each model type the nearest family, and what that does not compute.
_DIFFERENCES = {
    "deepseek_v32": ("deepseek_v3", _SPARSE),
    "gemma2": ("gemma3_text", "capped logits, and attention without norms on q and k"),
    "glm4": ("llama", "norms around attention and MLP, and interleaved rotation"),
    "glm_moe_dsa": ("deepseek_v3", _SPARSE),
    "mixtral": ("qwen3_moe", "other names of the experts' tensors, and no norms on q and k"),
}
# Keys of transformers 4, and those that say nothing about what is computed.
_WITHOUT_MEANING = {
    "architectures",
    "auto_map",
    "model_type",
    "num_experts",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}
_MOST_KEYS = 6


def refusal(raw: Mapping[str, Any], supported: Collection[str]) -> str:
    """One line about the `model_type` of a `config.json` that is not among the `supported` ones."""
    kind = str(raw.get("model_type"))
    if kind in _DIFFERENCES:
        nearest, difference = _DIFFERENCES[kind]
        what = f"which lacks {difference}"
    else:
        nearest = _nearest(kind, raw, supported)
        keys = sorted(raw.keys() - _keys(nearest))
        more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
        what = (
            f"whose config.json does not have the keys {', '.join(keys[:_MOST_KEYS])}{more}"
            if keys
            else "whose config.json has the same keys: if it computes the same, set model_type to it"
        )
    known = ", ".join(sorted(supported))
    return f"model_type {kind!r} is not supported; nearest is {nearest}, {what}; supported: {known}"


def _nearest(kind: str, raw: Mapping[str, Any], supported: Collection[str]) -> str:
    if alike := difflib.get_close_matches(kind, supported, n=1):
        return alike[0]
    if "kv_lora_rank" in raw:
        return "deepseek_v3"
    return "qwen3_moe" if any("expert" in key for key in raw) else "llama"


def _keys(family: str) -> set[str]:
    """The keys of a family's `config.json`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family).to_dict().keys() | _WITHOUT_MEANING
