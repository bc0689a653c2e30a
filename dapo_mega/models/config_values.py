"""Checks the types and bounds of the values in a `config.json` before they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError

# Far above any model's, and small enough to count with: lists as long as these are made.
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 100_000
_LONGEST = 2**31

_COUNTS = {
    "num_hidden_layers": (1, _MOST_LAYERS),
    "num_attention_heads": (1, 2**20),
    "num_key_value_heads": (1, 2**20),
    "hidden_size": (1, 2**24),
    "intermediate_size": (1, 2**26),
    "head_dim": (1, 2**20),
    "vocab_size": (1, 2**28),
    "max_position_embeddings": (1, _LONGEST),
    "original_max_position_embeddings": (1, _LONGEST),
    "sliding_window": (0, _LONGEST),
    "num_experts": (1, _MOST_EXPERTS),
    "num_local_experts": (1, _MOST_EXPERTS),
    "n_routed_experts": (1, _MOST_EXPERTS),
    "num_experts_per_tok": (1, _MOST_EXPERTS),
    "moe_intermediate_size": (1, 2**26),
    "shared_expert_intermediate_size": (0, 2**26),
    "n_shared_experts": (1, _MOST_EXPERTS),
    "n_group": (0, _MOST_EXPERTS),
    "topk_group": (0, _MOST_EXPERTS),
    "first_k_dense_replace": (0, _MOST_LAYERS),
    "decoder_sparse_step": (0, _LONGEST),
    "sliding_window_pattern": (1, _LONGEST),
    "no_rope_layer_interval": (1, _LONGEST),
    "moe_layer_freq": (0, _LONGEST),
    "q_lora_rank": (1, 2**24),
    "kv_lora_rank": (1, 2**24),
    "qk_nope_head_dim": (0, 2**20),
    "qk_rope_head_dim": (1, 2**20),
    "v_head_dim": (1, 2**20),
}
# Bounds that are not reached themselves.
_NUMBERS = {
    "rms_norm_eps": (0.0, 1.0),
    "rope_theta": (1.0, math.inf),
    "partial_rotary_factor": (0.0, math.inf),
    "routed_scaling_factor": (0.0, math.inf),
    "swiglu_limit": (0.0, math.inf),
    "query_pre_attn_scalar": (0.0, math.inf),
    "rope_local_base_freq": (1.0, math.inf),
}
_OF_ROPE = {
    "rope_theta": (1.0, math.inf),
    **dict.fromkeys(("partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"), (0.0, math.inf)),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), (0.0, math.inf)),
}
# Weights of a term: 0 leaves it out.
_WEIGHTS_OF_ROPE = ("mscale", "mscale_all_dim")
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "norm_topk_prob",
    "use_sliding_window",
    "rope_interleave",
    "use_qk_norm",
)
_LISTS = {"layer_types": str, "mlp_only_layers": int, "no_rope_layers": int}


def check_values(raw: Mapping[str, Any]) -> None:
    """Raise InputError naming the first key of a `config.json` whose value no model can have.

    Keys that are not there, null, or unknown are left to who reads them.
    """
    for key, (low, high) in _COUNTS.items():
        _check_count(key, raw.get(key), low, high)
    for key, (above, below) in _NUMBERS.items():
        _check_number(key, raw.get(key), above, below)
    for key in _SWITCHES:
        if not isinstance(raw.get(key), bool | None):
            raise InputError(f"{key}={_shown(raw[key])} is neither true nor false; correct it")
    for key, kind in _LISTS.items():
        found = raw.get(key)
        if found is not None and not (isinstance(found, list) and all(type(item) is kind for item in found)):
            raise InputError(f"{key}={_shown(found)} is no list of {kind.__name__}; correct it")
    for record in ("rope_scaling", "rope_parameters"):
        _check_rope(record, raw.get(record))
    for layers in ("full_attention", "sliding_attention"):
        _check_rope(f"rope_parameters.{layers}", (raw.get("rope_parameters") or {}).get(layers))


def _check_rope(record: str, rope: Any) -> None:
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise InputError(f"{record}={_shown(rope)} is no JSON object; correct it")
    for key, (above, below) in _OF_ROPE.items():
        _check_number(f"{record}.{key}", rope.get(key), above, below)
    positions = "original_max_position_embeddings"
    _check_count(f"{record}.{positions}", rope.get(positions), *_COUNTS[positions])
    for key in _WEIGHTS_OF_ROPE:
        if rope.get(key) != 0:
            _check_number(f"{record}.{key}", rope.get(key), 0.0, math.inf)
    lower, upper = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if lower is not None and upper is not None and not lower < upper:
        raise InputError(f"{record}.low_freq_factor={lower} is not below high_freq_factor={upper}; correct them")
    factors = rope.get("short_factor")
    if factors is not None and not (
        isinstance(factors, list) and all(type(item) in (int, float) and 0 < item < math.inf for item in factors)
    ):
        raise InputError(f"{record}.short_factor={_shown(factors)} is no list of numbers above 0; correct it")
    if not isinstance(rope.get("truncate"), bool | None):
        raise InputError(f"{record}.truncate={_shown(rope['truncate'])} is neither true nor false; correct it")


def _check_count(key: str, value: Any, low: int, high: int) -> None:
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise InputError(f"{key}={_shown(value)} is not a whole number from {low} to {high}; correct it")


def _check_number(key: str, value: Any, above: float, below: float) -> None:
    if value is None or (type(value) in (int, float) and above < value < below):
        return
    bounds = f"above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
    raise InputError(f"{key}={_shown(value)} is not a number {bounds}; correct it")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
