"""DeepSeek-V3 and R1: latent attention; sigmoid routing over groups, with a bias that keeps the experts balanced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models import deepseek
from dapo_mega.models.architecture import Architecture, ExpertGroups
from dapo_mega.models.families import MTP_AS_LAST_LAYER, ModelFamily

# Experts whose scores make up the worth of a group. Megatron-Core takes num_experts_per_tok // topk_group.
_RANKING_EXPERTS = 2
_DEFAULTS = {
    **deepseek.DEFAULTS,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**_DEFAULTS, **raw}
    if raw.get("scoring_func", "sigmoid") != "sigmoid":
        raise InputError(f"deepseek_v3 with scoring_func={raw['scoring_func']!r} is not supported; only 'sigmoid' is")
    if not raw.get("rope_interleave", True):
        raise InputError("deepseek_v3 with rope_interleave=false is not supported; only interleaved rotation is")
    return deepseek.read(raw, **sigmoid_routing(raw))


def sigmoid_routing(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Experts` about routing, from a complete `config.json`. GLM-4.5 routes alike."""
    family = raw["model_type"]
    per_token = raw["num_experts_per_tok"]
    if not raw.get("norm_topk_prob", True) or per_token == 1:
        raise InputError(
            f"{family} with norm_topk_prob=false or num_experts_per_tok=1 is not supported: Megatron-Core scales the "
            "sigmoid scores of two or more experts to sum to 1"
        )
    groups = None
    if deepseek.has_groups(raw):
        if per_token // raw["topk_group"] != _RANKING_EXPERTS:
            raise InputError(
                f"{family} with num_experts_per_tok={per_token} and topk_group={raw['topk_group']} is not "
                f"supported; Megatron-Core ranks groups as the model does only where the first is twice the second"
            )
        groups = ExpertGroups(raw["n_group"], raw["topk_group"], ranked_by="sum")
    return {
        "normalised": True,
        "scores": "sigmoid",
        "scaling": float(raw["routed_scaling_factor"]),
        "groups": groups,
        "has_router_bias": True,
    }


FAMILY = ModelFamily(
    model_type="deepseek_v3",
    read=_read,
    per_layer=deepseek.PER_LAYER,
    mtp=MTP_AS_LAST_LAYER,
)
