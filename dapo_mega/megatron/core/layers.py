"""Layer specs for GPU and CPU: Transformer Engine layers, or Megatron's local layers with our RMSNorm and our packed
attention. Both take the same packed micro-batches; nothing else differs between GPU and CPU."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from dapo_mega.config import ModelConfig
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.local_layers import HeadsNorm, NormedAddition, RMSNorm, SwiGLU
from dapo_mega.megatron.core.packed_attention import PackedAttention
from dapo_mega.megatron.core.repairs.since_0_17.latent_attention import know_local_linear
from dapo_mega.megatron.core.repairs.since_0_19.latent_attention import keep_layers_of_spec
from dapo_mega.megatron.core.repairs.until_0_16.latent_attention import know_whether_transformer_engine_is_there
from dapo_mega.megatron.core.routing import BestExpertGroupRouter
from dapo_mega.models import Architecture


def uses_transformer_engine(config: ModelConfig) -> bool:
    """Whether to use Transformer Engine layers. Raises InputError if they are asked for and cannot run here."""
    available = accelerator.has_gpu() and importlib.util.find_spec("transformer_engine") is not None
    if config.layer_implementation == "transformer_engine" and not available:
        raise InputError(
            "model.layer_implementation=transformer_engine needs a CUDA device and the transformer-engine package; "
            "install it or set model.layer_implementation=local"
        )
    return available and config.layer_implementation != "local"


@functools.cache
def attends_with_sinks() -> tuple[bool, bool]:
    """Whether Transformer Engine attends with sinks over packed sequences here, in a kernel and in torch."""
    chosen = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    asked = chosen.AttentionParams(
        qkv_dtype=torch.bfloat16,
        qkv_layout="thd_thd_thd",
        attn_mask_type="padding_causal",
        window_size=(-1, 0),
        softmax_type="learnable",
    )
    _, in_kernel, in_torch = chosen.get_attention_backend(asked)[-1]
    return bool(in_kernel), bool(in_torch)


def is_fp8(parameter: Tensor) -> bool:
    """Whether Transformer Engine keeps this parameter in FP8."""
    return bool(is_float8tensor(parameter))


def block_spec(
    arch: Architecture, config: TransformerConfig, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Layers of one model chunk: this pipeline stage's, or its `vp_stage`-th part."""
    if config.multi_latent_attention:
        keep_layers_of_spec()
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    chunk = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds = [(arch.has_experts(layer), arch.has_delta(layer)) for layer in chunk]
    layers = {kind: _layer(arch, config, transformer_engine, *kind) for kind in set(kinds)}
    return TransformerBlockSubmodules(
        layer_specs=[layers[kind] for kind in kinds],
        layer_norm=LayerNormImpl if transformer_engine else RMSNorm,
    )


def layer_behind(arch: Architecture, config: TransformerConfig, transformer_engine: bool) -> ModuleSpec:
    """The decoder layer of multi-token prediction."""
    return _layer(arch, config, transformer_engine, arch.has_experts(arch.num_layers), has_delta=False)


def _layer(
    arch: Architecture, config: TransformerConfig, transformer_engine: bool, has_experts: bool, has_delta: bool
) -> ModuleSpec:
    layer = (_transformer_engine_layer if transformer_engine else _local_layer)(config, has_experts)
    if has_experts and arch.experts and arch.experts.groups and arch.experts.groups.ranked_by == "best":
        _parts(layer.submodules.mlp).router = BestExpertGroupRouter
    _add_biases(layer, arch)
    _place_norms(layer, arch, config)
    if has_delta:
        _use_delta(layer, config, transformer_engine)
    return layer


def _add_biases(layer: ModuleSpec, arch: Architecture) -> None:
    if arch.has_all_biases:
        return
    if arch.output_bias:
        attention = layer.submodules.self_attention.submodules
        attention.linear_proj = _biased(attention.linear_proj)
    if arch.mlp_bias:
        mlp = _parts(layer.submodules.mlp)
        mlp.linear_fc1, mlp.linear_fc2 = _biased(mlp.linear_fc1), _biased(mlp.linear_fc2)


def _use_delta(layer: ModuleSpec, config: TransformerConfig, transformer_engine: bool) -> None:
    # Imported when needed and Megatron's fusions are chosen.
    from dapo_mega.megatron.core.gated_delta import delta_spec

    backend: Any = LocalSpecProvider()
    if transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
    norm = LayerNormImpl if transformer_engine else RMSNorm
    layer.submodules.input_layernorm = norm
    layer.submodules.self_attention = delta_spec(
        config, backend.column_parallel_linear(), norm, backend.row_parallel_linear()
    )
    layer.submodules.sharded_state_dict_keys_map.pop("input_layernorm.", None)


def _place_norms(layer: ModuleSpec, arch: Architecture, config: TransformerConfig) -> None:
    """Norms behind attention and MLP, and those over all heads of queries and keys."""
    parts = layer.submodules
    if arch.norms == "behind":
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if arch.norms != "before":
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(NormedAddition, params={"config": config})
    if arch.qk_norm_over_heads:
        attention = parts.self_attention.submodules
        attention.q_layernorm = ModuleSpec(HeadsNorm, params={"num_heads": arch.num_attention_heads})
        attention.k_layernorm = ModuleSpec(HeadsNorm, params={"num_heads": arch.num_query_groups})


def _biased(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`linear`, always with a bias, because Megatron has one bias switch for all linear layers."""

    class Biased(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    return Biased


def _owning(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`linear` with an output of its own. Megatron adds the biases of experts to it in place, which autograd forbids
    for the view that its reduction over processes returns."""

    class Owning(linear):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(*args)
            return output.clone(), bias

    return Owning


def _kind(config: TransformerConfig, has_experts: bool) -> dict[str, Any]:
    """The settings by which Megatron chooses layer specs."""
    return {
        "num_experts": config.num_moe_experts if has_experts else None,
        "moe_grouped_gemm": config.moe_grouped_gemm and has_experts,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }


def _transformer_engine_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(**_kind(config, has_experts))


def _local_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **_kind(config, has_experts))
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    names = layer.submodules.sharded_state_dict_keys_map
    if config.multi_latent_attention:
        know_whether_transformer_engine_is_there()
        know_local_linear()
        # Replicated on every rank, like Transformer Engine's. Megatron shards the local ones and gathers their outputs,
        # so the rotated part of the keys would get its gradient from one rank's heads only.
        attention.linear_q_down_proj = Linear
        attention.linear_kv_down_proj = Linear
        attention.q_layernorm = RMSNorm
        attention.kv_layernorm = RMSNorm
        names |= {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    elif config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    _use_own_activation(layer.submodules.mlp)
    if has_experts:
        experts = _parts(_parts(layer.submodules.mlp).experts)
        if config.add_bias_linear:
            experts.linear_fc2 = _owning(experts.linear_fc2)
        # Checkpoints of Transformer Engine layers also have the norm before experts as a separate layer.
        del names["pre_mlp_layernorm."]
    return layer


def _use_own_activation(mlp: Any) -> None:
    """Use `SwiGLU` in an MLP, or in all MLPs of a mixture of experts."""
    for part in (getattr(_parts(mlp), name, None) for name in ("experts", "shared_experts")):
        if part:
            _parts(part).activation_func = SwiGLU
    if isinstance(_parts(mlp), MLPSubmodules):
        _parts(mlp).activation_func = SwiGLU


def _parts(spec: Any) -> Any:
    """The submodules of a spec; Megatron 0.17 and newer give partial functions for MLPs."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
