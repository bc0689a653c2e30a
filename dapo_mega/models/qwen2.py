"""Qwen2 and Qwen2.5 (dense): biases on q, k, v only, RMSNorm, SwiGLU, grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily, TensorRule
from dapo_mega.models.hf_sizes import common_sizes
from dapo_mega.models.layouts import Layout


def _read(raw: Mapping[str, Any]) -> Architecture:
    return Architecture(**common_sizes(raw), qkv_bias=True)


_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_HF}self_attn.{part}_proj.{kind}" for part in "qkv")


FAMILY = ModelFamily(
    model_type="qwen2",
    read=_read,
    before_layers=(TensorRule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Layout.VOCAB),),
    per_layer=(
        TensorRule(
            (_MEGATRON + "input_layernorm.weight", _MEGATRON + "self_attention.linear_qkv.layer_norm_weight"),
            (_HF + "input_layernorm.weight",),
            Layout.REPLICATED,
        ),
        TensorRule((_MEGATRON + "self_attention.linear_qkv.weight",), _qkv("weight"), Layout.QKV),
        TensorRule((_MEGATRON + "self_attention.linear_qkv.bias",), _qkv("bias"), Layout.QKV),
        TensorRule((_MEGATRON + "self_attention.linear_proj.weight",), (_HF + "self_attn.o_proj.weight",), Layout.ROW),
        TensorRule(
            (_MEGATRON + "pre_mlp_layernorm.weight", _MEGATRON + "mlp.linear_fc1.layer_norm_weight"),
            (_HF + "post_attention_layernorm.weight",),
            Layout.REPLICATED,
        ),
        TensorRule(
            (_MEGATRON + "mlp.linear_fc1.weight",),
            (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
            Layout.GATE_UP,
        ),
        TensorRule((_MEGATRON + "mlp.linear_fc2.weight",), (_HF + "mlp.down_proj.weight",), Layout.ROW),
    ),
    after_layers=(
        TensorRule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Layout.REPLICATED),
        TensorRule(("output_layer.weight",), ("lm_head.weight",), Layout.VOCAB),
    ),
)
