"""DeepSeek-V2: latent attention; softmax routing, limited to the groups of the best experts in the largest model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models import deepseek
from dapo_mega.models.architecture import Architecture, ExpertGroups
from dapo_mega.models.families import ModelFamily

_METHODS = ("greedy", "group_limited_greedy")
_DEFAULTS = {
    **deepseek.DEFAULTS,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**_DEFAULTS, **raw}
    method = raw["topk_method"]
    if method not in _METHODS:
        raise InputError(f"deepseek_v2 with topk_method={method!r} is not supported; supported: {', '.join(_METHODS)}")
    if raw.get("norm_topk_prob"):
        raise InputError("deepseek_v2 with norm_topk_prob=true is not supported: transformers does not scale them to 1")
    limits_groups = method == "group_limited_greedy" and deepseek.has_groups(raw)
    return deepseek.read(
        raw,
        normalised=False,
        scaling=float(raw["routed_scaling_factor"]),
        groups=ExpertGroups(raw["n_group"], raw["topk_group"], ranked_by="best") if limits_groups else None,
    )


FAMILY = ModelFamily(
    model_type="deepseek_v2",
    read=_read,
    per_layer=deepseek.PER_LAYER,
    has_token_classifier=False,
)
