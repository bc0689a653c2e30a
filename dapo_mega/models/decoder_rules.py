"""Tensor rules shared by families of pre-norm decoders: Hugging Face names and the matching Megatron names.

Rules whose tensors only some models have (biases, norms on queries and keys) look at the `Architecture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import HF_LAYER as HF_LAYER
from dapo_mega.models.families import MEGATRON_LAYER as MEGATRON_LAYER
from dapo_mega.models.families import TensorRule
from dapo_mega.models.layouts import ShardRule

_ATTENTION = MEGATRON_LAYER + "self_attention."
_HF_ATTENTION = HF_LAYER + "self_attn."
_MLP = MEGATRON_LAYER + "mlp."
_HF_MLP = HF_LAYER + "mlp."
_EXPERT = _MLP + "experts."
_HF_EXPERT = _HF_MLP + "experts.{expert}."
_SHARED = _MLP + "shared_experts."


def _projections(prefix: str, parts: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{part}_proj.{kind}" for part in parts)


INPUT_NORM = TensorRule(
    (MEGATRON_LAYER + "input_layernorm.weight", _ATTENTION + "linear_qkv.layer_norm_weight"),
    (HF_LAYER + "input_layernorm.weight",),
    ShardRule.REPLICATED,
    applies=lambda arch: arch.norms != "behind",
)
OUTPUT_PROJECTION = TensorRule((_ATTENTION + "linear_proj.weight",), (_HF_ATTENTION + "o_proj.weight",), ShardRule.ROW)


def _query_key_norms(layout: ShardRule, applies: Callable[[Architecture], bool]) -> Iterator[TensorRule]:
    for part in ("q", "k"):
        names = (f"{_ATTENTION}{part}_layernorm.weight",), (f"{_HF_ATTENTION}{part}_norm.weight",)
        yield TensorRule(*names, layout, applies)


ATTENTION = (
    INPUT_NORM,
    TensorRule(
        (_ATTENTION + "linear_qkv.weight",), _projections(_HF_ATTENTION, ("q", "k", "v"), "weight"), ShardRule.QKV
    ),
    TensorRule(
        (_ATTENTION + "linear_qkv.bias",),
        _projections(_HF_ATTENTION, ("q", "k", "v"), "bias"),
        ShardRule.QKV,
        applies=lambda arch: arch.qkv_bias,
    ),
    *_query_key_norms(ShardRule.REPLICATED, lambda arch: arch.qk_norm and not arch.qk_norm_over_heads),
    *_query_key_norms(ShardRule.COLUMN, lambda arch: arch.qk_norm_over_heads),
    OUTPUT_PROJECTION,
    TensorRule(
        (_ATTENTION + "linear_proj.bias",),
        (_HF_ATTENTION + "o_proj.bias",),
        ShardRule.REPLICATED,
        applies=lambda arch: arch.output_bias,
    ),
)
"""Grouped-query attention with the norm before it."""


def _on_attention(rule: TensorRule) -> TensorRule:
    """The rule for attention with output gates, in models that have it in some of their layers."""
    layout = ShardRule.GATED_QKV if rule.layout is ShardRule.QKV else rule.layout
    return rule if rule is INPUT_NORM else replace(rule, layout=layout, layers="attention")


def hybrid_attention(delta_inputs: tuple[str, ...]) -> tuple[TensorRule, ...]:
    """Gated attention in some layers and a gated delta rule in the others, by the names of that one's projections."""

    def delta(megatron: str, hf: tuple[str, ...], layout: ShardRule) -> TensorRule:
        names = tuple(f"{HF_LAYER}linear_attn.{name}" for name in hf)
        return TensorRule((_ATTENTION + megatron,), names, layout, layers="delta")

    inputs = tuple(f"{name}.weight" for name in delta_inputs)
    return (
        *map(_on_attention, ATTENTION),
        delta("in_proj.weight", inputs, ShardRule.DELTA_BY_HEAD if len(inputs) == 2 else ShardRule.DELTA),
        delta("conv1d.weight", ("conv1d.weight",), ShardRule.DELTA),
        delta("dt_bias", ("dt_bias",), ShardRule.COLUMN),
        delta("A_log", ("A_log",), ShardRule.COLUMN),
        delta("out_norm.weight", ("norm.weight",), ShardRule.REPLICATED),
        delta("out_proj.weight", ("out_proj.weight",), ShardRule.ROW),
    )


def _projects_queries_up(arch: Architecture) -> bool:
    return arch.latent_attention is not None and arch.latent_attention.query_rank is not None


LATENT_ATTENTION = (
    INPUT_NORM,
    TensorRule(
        (_ATTENTION + "linear_q_proj.weight",),
        (_HF_ATTENTION + "q_proj.weight",),
        ShardRule.COLUMN,
        applies=lambda arch: not _projects_queries_up(arch),
    ),
    TensorRule(
        (_ATTENTION + "linear_q_down_proj.weight",),
        (_HF_ATTENTION + "q_a_proj.weight",),
        ShardRule.REPLICATED,
        applies=_projects_queries_up,
    ),
    TensorRule(
        (_ATTENTION + "q_layernorm.weight", _ATTENTION + "linear_q_up_proj.layer_norm_weight"),
        (_HF_ATTENTION + "q_a_layernorm.weight",),
        ShardRule.REPLICATED,
        applies=_projects_queries_up,
    ),
    TensorRule(
        (_ATTENTION + "linear_q_up_proj.weight",),
        (_HF_ATTENTION + "q_b_proj.weight",),
        ShardRule.COLUMN,
        applies=_projects_queries_up,
    ),
    TensorRule(
        (_ATTENTION + "linear_kv_down_proj.weight",),
        (_HF_ATTENTION + "kv_a_proj_with_mqa.weight",),
        ShardRule.REPLICATED,
    ),
    TensorRule(
        (_ATTENTION + "kv_layernorm.weight", _ATTENTION + "linear_kv_up_proj.layer_norm_weight"),
        (_HF_ATTENTION + "kv_a_layernorm.weight",),
        ShardRule.REPLICATED,
    ),
    TensorRule((_ATTENTION + "linear_kv_up_proj.weight",), (_HF_ATTENTION + "kv_b_proj.weight",), ShardRule.COLUMN),
    OUTPUT_PROJECTION,
)
"""Multi-head latent attention with the norm before it."""

MLP_NORM = TensorRule(
    # Transformer Engine fuses it into a dense MLP; before experts it is a layer of its own.
    (MEGATRON_LAYER + "pre_mlp_layernorm.weight", _MLP + "linear_fc1.layer_norm_weight"),
    (HF_LAYER + "post_attention_layernorm.weight",),
    ShardRule.REPLICATED,
)

NORMS_BEHIND = (
    TensorRule(
        (MEGATRON_LAYER + "self_attn_bda.norm.weight",),
        (HF_LAYER + "post_attention_layernorm.weight",),
        ShardRule.REPLICATED,
    ),
    TensorRule(
        (MEGATRON_LAYER + "mlp_bda.norm.weight",),
        (HF_LAYER + "post_feedforward_layernorm.weight",),
        ShardRule.REPLICATED,
    ),
)
"""Norms of what attention and MLP add to the hidden states."""

DOWN_PROJECTION = TensorRule(
    (_MLP + "linear_fc2.weight",), (_HF_MLP + "down_proj.weight",), ShardRule.ROW, layers="dense"
)

DENSE_MLP = (
    TensorRule(
        (_MLP + "linear_fc1.weight",),
        _projections(_HF_MLP, ("gate", "up"), "weight"),
        ShardRule.GATE_UP,
        layers="dense",
    ),
    TensorRule(
        (_MLP + "linear_fc1.bias",),
        _projections(_HF_MLP, ("gate", "up"), "bias"),
        ShardRule.GATE_UP,
        applies=lambda arch: arch.mlp_bias,
        layers="dense",
    ),
    DOWN_PROJECTION,
    TensorRule(
        (_MLP + "linear_fc2.bias",),
        (_HF_MLP + "down_proj.bias",),
        ShardRule.REPLICATED,
        applies=lambda arch: arch.mlp_bias,
        layers="dense",
    ),
)
"""SwiGLU."""

FUSED_LAYER = (
    INPUT_NORM,
    TensorRule((_ATTENTION + "linear_qkv.weight",), (_HF_ATTENTION + "qkv_proj.weight",), ShardRule.FUSED_QKV),
    OUTPUT_PROJECTION,
    MLP_NORM,
    TensorRule((_MLP + "linear_fc1.weight",), (_HF_MLP + "gate_up_proj.weight",), ShardRule.FUSED_GATE_UP),
    DOWN_PROJECTION,
)
"""A layer without biases whose checkpoints hold q, k, v in one tensor, and gate and up in another."""

EXPERTS = (
    TensorRule((_MLP + "router.weight",), (_HF_MLP + "gate.weight",), ShardRule.REPLICATED, layers="experts"),
    TensorRule(
        (_MLP + "router.expert_bias",),
        (_HF_MLP + "gate.e_score_correction_bias",),
        ShardRule.REPLICATED,
        applies=lambda arch: arch.experts is not None and arch.experts.has_router_bias,
        layers="experts",
    ),
    TensorRule(
        (_EXPERT + "local_experts.{expert}.linear_fc1.weight", _EXPERT + "linear_fc1.weight{expert}"),
        _projections(_HF_EXPERT, ("gate", "up"), "weight"),
        ShardRule.GATE_UP,
        layers="experts",
    ),
    TensorRule(
        (_EXPERT + "local_experts.{expert}.linear_fc2.weight", _EXPERT + "linear_fc2.weight{expert}"),
        (_HF_EXPERT + "down_proj.weight",),
        ShardRule.ROW,
        layers="experts",
    ),
)
"""A router and the experts it chooses from."""


def shared_expert(name: str) -> tuple[TensorRule, ...]:
    """The expert that every token goes to, by the name that it has in the family's checkpoints, and its gate."""
    hf = f"{_HF_MLP}{name}."
    return (
        TensorRule(
            (_SHARED + "linear_fc1.weight",),
            _projections(hf, ("gate", "up"), "weight"),
            ShardRule.GATE_UP,
            layers="experts",
        ),
        TensorRule((_SHARED + "linear_fc2.weight",), (hf + "down_proj.weight",), ShardRule.ROW, layers="experts"),
        TensorRule(
            (_SHARED + "gate_weight",),
            (f"{_HF_MLP}{name}_gate.weight",),
            ShardRule.REPLICATED,
            applies=lambda arch: arch.experts is not None and arch.experts.gates_shared,
            layers="experts",
        ),
    )
