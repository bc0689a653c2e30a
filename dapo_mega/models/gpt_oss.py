"""gpt-oss: attention sinks, a sliding window in every other layer, YaRN, and experts with biases and a clamped SwiGLU,
whose originals are in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models import decoder_rules as rules
from dapo_mega.models.architecture import Architecture, Experts
from dapo_mega.models.families import ModelFamily, Shapes, TensorRule
from dapo_mega.models.hf_sizes import common_sizes, full_attention_layers
from dapo_mega.models.layouts import ShardRule

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# That of Megatron's quick_gelu.
_ALPHA = 1.702


def _read(raw: Mapping[str, Any]) -> Architecture:
    raw = {**_DEFAULTS, **raw}
    if not (raw.get("rope_scaling") or raw.get("rope_parameters")):
        raw["rope_parameters"] = _ROPE
    if (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        del raw["quantization_config"]
    if raw.get("attention_bias", True) is False or raw.get("swiglu_alpha", _ALPHA) != _ALPHA:
        raise InputError(f"gpt_oss with attention_bias=false or a swiglu_alpha other than {_ALPHA} is not supported")
    return Architecture(
        **common_sizes({**raw, "layer_types": None}, {}),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        sliding_window=raw["sliding_window"],
        full_attention_layers=full_attention_layers(raw, 2),
        attention_sinks=True,
        experts=Experts(
            number=raw["num_local_experts"],
            per_token=raw["num_experts_per_tok"],
            ffn_hidden_size=raw["intermediate_size"],
            normalised=True,
            has_biases=True,
            swiglu_limit=float(raw["swiglu_limit"]),
        ),
    )


def _shapes(arch: Architecture) -> Shapes:
    assert arch.experts
    hidden, inner, number = arch.hidden_size, arch.experts.ffn_hidden_size, arch.experts.number
    return {
        "self_attn.sinks": (arch.num_attention_heads,),
        "mlp.router.weight": (number, hidden),
        "mlp.router.bias": (number,),
        "mlp.experts.gate_up_proj": (hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (2 * inner,),
        "mlp.experts.down_proj": (inner, hidden),
        "mlp.experts.down_proj_bias": (hidden,),
    }


_MLP, _HF_MLP = rules.MEGATRON_LAYER + "mlp.", rules.HF_LAYER + "mlp."


def _of_experts(linear: str, kind: str, hf: str, layout: ShardRule) -> TensorRule:
    names = (f"local_experts.{{expert}}.{linear}.{kind}", f"{linear}.{kind}{{expert}}")
    return TensorRule(tuple(f"{_MLP}experts.{name}" for name in names), (f"{_HF_MLP}experts.{{expert}}.{hf}",), layout)


FAMILY = ModelFamily(
    model_type="gpt_oss",
    read=_read,
    per_layer=(
        *rules.ATTENTION,
        TensorRule(
            (rules.MEGATRON_LAYER + "self_attention.core_attention.softmax_offset",),
            (rules.HF_LAYER + "self_attn.sinks",),
            ShardRule.COLUMN,
        ),
        rules.MLP_NORM,
        *(
            TensorRule((f"{_MLP}router.{kind}",), (f"{_HF_MLP}router.{kind}",), ShardRule.REPLICATED)
            for kind in ("weight", "bias")
        ),
        _of_experts("linear_fc1", "weight", "gate_up_proj", ShardRule.TRANSPOSED_INTERLEAVED_GATE_UP),
        _of_experts("linear_fc1", "bias", "gate_up_proj_bias", ShardRule.INTERLEAVED_GATE_UP),
        _of_experts("linear_fc2", "weight", "down_proj", ShardRule.TRANSPOSED_ROW),
        _of_experts("linear_fc2", "bias", "down_proj_bias", ShardRule.REPLICATED),
    ),
    shapes=_shapes,
)
