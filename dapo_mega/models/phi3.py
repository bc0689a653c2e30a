"""Phi-3, Phi-4 and Phi-4-mini: q, k, v in one tensor on disk, gate and up in another; partial rotation, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily, Shapes
from dapo_mega.models.hf_sizes import common_sizes

_DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
}


def _read(raw: Mapping[str, Any]) -> Architecture:
    sizes = common_sizes(raw, _DEFAULTS)
    window = raw.get("sliding_window")
    if window and window >= sizes["max_positions"]:
        window = None
    return Architecture(**sizes, qkv_bias=False, sliding_window=window)


def _shapes(arch: Architecture) -> Shapes:
    heads = arch.num_attention_heads + 2 * arch.num_query_groups
    return {
        "self_attn.qkv_proj.weight": (heads * arch.head_dim, arch.hidden_size),
        "mlp.gate_up_proj.weight": (2 * arch.ffn_hidden_size, arch.hidden_size),
    }


FAMILY = ModelFamily(model_type="phi3", read=_read, per_layer=rules.FUSED_LAYER, shapes=_shapes)
