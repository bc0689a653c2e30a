"""What DeepSeek-V2, DeepSeek-V3 and GLM-4.5 share: the first layers dense, then experts with a shared one; and the
latent attention of the first two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture, Experts, LatentAttention
from dapo_mega.models.hf_sizes import common_sizes
from dapo_mega.models.rope import RopeScaling, YarnScaling

MLP = (rules.MLP_NORM, *rules.DENSE_MLP, *rules.EXPERTS, *rules.shared_expert("shared_experts"))
PER_LAYER = (*rules.LATENT_ATTENTION, *MLP)

# The norms of the latent vectors have this one whatever config.json says, Megatron-Core has one for all norms.
_NORM_EPSILON = 1e-6


# What both families' configuration classes in transformers have for keys left out.
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def read(raw: Mapping[str, Any], **routing: Any) -> Architecture:
    """The architecture of a complete `config.json`; `routing` are the fields of `Experts` in which families differ."""
    _check(raw)
    sizes = common_sizes(raw, {})
    latent = LatentAttention(
        query_rank=raw["q_lora_rank"],
        key_value_rank=raw["kv_lora_rank"],
        unrotated_head_dim=raw["qk_nope_head_dim"],
        rotated_head_dim=raw["qk_rope_head_dim"],
        value_head_dim=raw["v_head_dim"],
        yarn_weights=_yarn_weights(raw, sizes["rope_scaling"]),
    )
    sizes["num_query_groups"] = sizes["num_attention_heads"]
    sizes["head_dim"] = latent.unrotated_head_dim + latent.rotated_head_dim
    if latent.value_head_dim > sizes["head_dim"]:
        raise InputError(
            f"v_head_dim={latent.value_head_dim} is not supported: it may be qk_nope_head_dim + qk_rope_head_dim = "
            f"{sizes['head_dim']} at most"
        )
    return Architecture(**sizes, qkv_bias=False, experts=read_experts(raw, **routing), latent_attention=latent)


def read_experts(raw: Mapping[str, Any], **routing: Any) -> Experts:
    """The mixture of a complete `config.json`; `routing` as in `read`."""
    return Experts(
        number=raw["n_routed_experts"],
        per_token=raw["num_experts_per_tok"],
        ffn_hidden_size=raw["moe_intermediate_size"],
        shared_ffn_hidden_size=raw["moe_intermediate_size"] * raw["n_shared_experts"] or None,
        dense_layers=frozenset(range(raw["first_k_dense_replace"])),
        **routing,
    )


def has_groups(raw: Mapping[str, Any]) -> bool:
    """Whether a token's experts are limited to some of several groups."""
    return (raw.get("n_group") or 1) > 1


def _yarn_weights(raw: Mapping[str, Any], scaling: RopeScaling | None) -> tuple[float, float] | None:
    """`mscale` and `mscale_all_dim` of a YaRN record; InputError if Megatron cannot apply it."""
    if scaling is None:
        return None
    record = raw.get("rope_scaling") or raw["rope_parameters"]
    weights = (record.get("mscale"), record.get("mscale_all_dim"))
    if not (
        isinstance(scaling, YarnScaling) and scaling.truncate and all(weights) and "attention_factor" not in record
    ):
        raise InputError(
            f"{raw['model_type']} with the rope scaling {dict(record)} is not supported; only yarn with mscale and "
            f"mscale_all_dim, and without attention_factor and truncate=false, is"
        )
    return weights


def _check(raw: Mapping[str, Any]) -> None:
    family = raw["model_type"]
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise InputError(f"{family} with attention_bias=true or mlp_bias=true is not supported")
    if raw.get("moe_layer_freq", 1) != 1:
        raise InputError(f"{family} with moe_layer_freq={raw['moe_layer_freq']} is not supported; only 1 is")
    if raw.get("rms_norm_eps", _NORM_EPSILON) != _NORM_EPSILON:
        raise InputError(f"{family} with rms_norm_eps={raw['rms_norm_eps']} is not supported; only {_NORM_EPSILON} is")
