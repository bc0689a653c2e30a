"""Qwen3-MoE: no biases, norms on queries and keys, every layer's MLP a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Architecture, Experts
from dapo_mega.models.families import ModelFamily, TensorRule
from dapo_mega.models.hf_sizes import common_sizes
from dapo_mega.models.layouts import Layout


def _read(raw: Mapping[str, Any]) -> Architecture:
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise InputError(
            "qwen3_moe with dense layers in between (mlp_only_layers, decoder_sparse_step) is not supported"
        )
    if raw.get("attention_bias"):
        raise InputError("qwen3_moe with attention_bias=true is not supported")
    # transformers 4 writes num_experts, transformers 5 num_local_experts.
    num_experts = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]
    return Architecture(
        **common_sizes(raw),
        qkv_bias=False,
        qk_norm=True,
        experts=Experts(
            number=num_experts,
            per_token=raw["num_experts_per_tok"],
            ffn_hidden_size=raw["moe_intermediate_size"],
            normalised=bool(raw.get("norm_topk_prob", False)),
            # Not in Qwen's own files; models grown from them may route as DeepSeek-V3 does, and this is its key.
            scores=raw.get("scoring_func", "softmax"),
        ),
    )


_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_EXPERT = _MEGATRON + "mlp.experts."
_HF_EXPERT = _HF + "mlp.experts.{expert}."

FAMILY = ModelFamily(
    model_type="qwen3_moe",
    read=_read,
    before_layers=(TensorRule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Layout.VOCAB),),
    per_layer=(
        TensorRule(
            (_MEGATRON + "input_layernorm.weight", _MEGATRON + "self_attention.linear_qkv.layer_norm_weight"),
            (_HF + "input_layernorm.weight",),
            Layout.REPLICATED,
        ),
        TensorRule(
            (_MEGATRON + "self_attention.linear_qkv.weight",),
            tuple(f"{_HF}self_attn.{part}_proj.weight" for part in "qkv"),
            Layout.QKV,
        ),
        TensorRule(
            (_MEGATRON + "self_attention.q_layernorm.weight",), (_HF + "self_attn.q_norm.weight",), Layout.REPLICATED
        ),
        TensorRule(
            (_MEGATRON + "self_attention.k_layernorm.weight",), (_HF + "self_attn.k_norm.weight",), Layout.REPLICATED
        ),
        TensorRule((_MEGATRON + "self_attention.linear_proj.weight",), (_HF + "self_attn.o_proj.weight",), Layout.ROW),
        TensorRule(
            (_MEGATRON + "pre_mlp_layernorm.weight",), (_HF + "post_attention_layernorm.weight",), Layout.REPLICATED
        ),
        TensorRule((_MEGATRON + "mlp.router.weight",), (_HF + "mlp.gate.weight",), Layout.REPLICATED),
        TensorRule(
            (_EXPERT + "local_experts.{expert}.linear_fc1.weight", _EXPERT + "linear_fc1.weight{expert}"),
            (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"),
            Layout.GATE_UP,
        ),
        TensorRule(
            (_EXPERT + "local_experts.{expert}.linear_fc2.weight", _EXPERT + "linear_fc2.weight{expert}"),
            (_HF_EXPERT + "down_proj.weight",),
            Layout.ROW,
        ),
    ),
    after_layers=(
        TensorRule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Layout.REPLICATED),
        TensorRule(("output_layer.weight",), ("lm_head.weight",), Layout.VOCAB),
    ),
)
