"""Reads the settings that the configurations of all Hugging Face families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dapo_mega.errors import InputError
from dapo_mega.models.rope import rope_sizes


def common_sizes(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], activations: Sequence[str] = ("silu", "swish")
) -> dict[str, Any]:
    """The fields of `Architecture` that every family writes alike.

    `defaults` are the values that the family's configuration class in transformers has for keys left out; with
    `partial_rotary_factor` among them the family may rotate a part of each head. `activations` are those that it may
    have. Raises KeyError for a key that is
    missing without one, InputError naming what is not supported.
    """
    raw = {**defaults, **raw}
    _refuse_unsupported(raw, activations)
    heads = raw["num_attention_heads"]
    return {
        "model_type": raw["model_type"],
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": raw["num_key_value_heads"] or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "vocab_size": raw["vocab_size"],
        "norm_epsilon": raw.get("rms_norm_eps", 1e-6),
        **rope_sizes(raw, may_be_partial="partial_rotary_factor" in defaults),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def attention_biases(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Architecture` that `attention_bias` sets: all four projections have biases, or none has."""
    biased = bool(raw.get("attention_bias", False))
    return {"qkv_bias": biased, "output_bias": biased}


_FP8_BLOCKS: Final = {"quant_method": "fp8", "weight_block_size": [128, 128]}
"""The quantised weights that `HfCheckpoint` reads: those of DeepSeek's originals."""


def _refuse_unsupported(raw: Mapping[str, Any], activations: Sequence[str]) -> None:
    """Raise InputError for a setting that changes the model's computation and that the policy does not support."""
    quantization = raw.get("quantization_config") or _FP8_BLOCKS
    if not isinstance(quantization, dict) or any(quantization.get(key) != value for key, value in _FP8_BLOCKS.items()):
        raise InputError(
            f"the {raw['model_type']} checkpoint has the quantization_config {quantization}; only weights in bf16, "
            f"float32 or FP8 with {_FP8_BLOCKS} are read: take one of these"
        )
    for key in ("use_sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key):
            raise InputError(
                f"{key}={raw[key]} in config.json is not supported for {raw['model_type']}; take a model without it"
            )
    if (activation := raw.get("hidden_act", activations[0])) not in activations:
        raise InputError(
            f"hidden_act={activation!r} is not supported for {raw['model_type']}; only {activations[0]!r} is"
        )
    if others := set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise InputError(
            f"layer_types {sorted(others)} are not supported for {raw['model_type']}; take a model with full_attention"
        )


def full_attention_layers(raw: Mapping[str, Any], interval: int, others: str = "sliding_attention") -> frozenset[int]:
    """Layers with full attention, counted from 0, where all are of that kind or of the kind `others`: by `layer_types`,
    or else every `interval`-th."""
    number = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [others if (layer + 1) % interval else "full_attention" for layer in range(number)]
    if len(kinds) != number or set(kinds) - {"full_attention", others}:
        raise InputError(
            f"layer_types has {len(kinds)} entries of {sorted(set(kinds))} for num_hidden_layers={number}; each layer "
            f"must be full_attention or {others}"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def sparse_dense_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Layers without experts, counted from 0, as Qwen's mixtures name them: `mlp_only_layers`, and all but every
    `decoder_sparse_step`-th layer."""
    step = raw.get("decoder_sparse_step") or 1
    listed = raw.get("mlp_only_layers") or ()
    return frozenset(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
