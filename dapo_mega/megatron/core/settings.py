"""A run's configuration, and a Hugging Face architecture, in Megatron's terms."""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from dapo_mega.config import ComputeConfig, ModelConfig, ParallelConfig
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.layers import attends_with_sinks, uses_transformer_engine
from dapo_mega.models import Architecture
from dapo_mega.models.rope import YarnScaling

_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def transformer_config(
    arch: Architecture, model: ModelConfig, parallel: ParallelConfig, compute: ComputeConfig
) -> TransformerConfig:
    """Megatron's TransformerConfig for `arch` in the given layout and precision."""
    _check_transformer_engine(arch, model, parallel)
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    make_config = MLATransformerConfig if arch.latent_attention else TransformerConfig
    config = make_config(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_epsilon,
        layernorm_zero_centered_gamma=arch.zero_centred_norms,
        gated_linear_unit=True,
        # One switch for all layers, routers included; where only some have biases, specs add them.
        add_bias_linear=arch.has_all_biases,
        add_qkv_bias=arch.qkv_bias,
        softmax_scale=arch.softmax_scale,
        softmax_type="learnable" if arch.attention_sinks else "vanilla",
        # Megatron's window does not count the query's own key.
        window_size=(arch.sliding_window - 1, 0) if arch.sliding_window else None,
        window_attn_skip_freq=[int(layer not in arch.full_attention_layers) for layer in range(arch.num_layers)]
        if arch.full_attention_layers
        else None,
        no_rope_freq=[int(layer in arch.unrotated_layers) for layer in range(arch.num_layers)]
        if arch.unrotated_layers
        else None,
        attention_output_gate=arch.output_gate,
        qk_layernorm=arch.qk_norm or arch.latent_attention is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Losses are sums; Megatron divides them once by the global token count.
        calculate_per_token_loss=True,
        # Weights come from a checkpoint, but Megatron marks parameters as tensor-parallel only during
        # initialisation, and the gradient norm needs the marks.
        perform_initialization=True,
        deterministic_mode=compute.deterministic,
        **_layout_settings(parallel, arch.num_layers),
        **_device_settings(arch, model),
        **_expert_settings(arch, model, compute),
        **_latent_attention_settings(arch),
        **_delta_settings(arch),
        **_recompute_settings(compute),
        **_fp8_settings(arch, compute),
    )
    config.finalize_model_grads_func = finalize_model_grads
    if arch.rotary_magnitude != 1.0:
        # Where Megatron's layers look for the magnitude of cosines and sines: (1 + first / 10 ln(scale)) / 1.
        factors = {"yarn_rotary_scaling_factor": math.e**10, "yarn_mscale": arch.rotary_magnitude - 1}
        vars(config).update(factors, yarn_mscale_all_dim=0.0)
    return config


def _check_transformer_engine(arch: Architecture, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise InputError for what its layers do not compute, where they are used."""
    if not uses_transformer_engine(model):
        return
    if (arch.sliding_window or arch.attention_sinks) and parallel.context > 1:
        what = "attention sinks" if arch.attention_sinks else f"sliding_window={arch.sliding_window}"
        raise InputError(
            f"{what} under parallel.context={parallel.context} is not supported by Transformer Engine's ring "
            "attention; set parallel.context=1, or model.layer_implementation=local"
        )
    if arch.attention_sinks and not any(attends_with_sinks()):
        raise InputError(
            f"{arch.model_type} has attention sinks, which this Transformer Engine does not compute for packed "
            "sequences (2.20 does); install a newer one, or set model.layer_implementation=local"
        )
    if arch.needs_local_layers:
        raise InputError(
            f"{arch.model_type} is not supported on Transformer Engine's layers; set model.layer_implementation=local"
        )
    if model.dtype == "fp32" and parallel.context > 1:
        raise InputError(
            f"model.dtype=fp32 under parallel.context={parallel.context} is not supported by Transformer Engine's ring "
            "attention; set model.dtype=bf16 or parallel.context=1"
        )


def _layout_settings(parallel: ParallelConfig, num_layers: int) -> dict[str, Any]:
    interleaved = parallel.virtual_pipeline > 1
    chunks = [["decoder"] * len(layers) for layers in parallel.chunk_layers(num_layers)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "pipeline_model_parallel_layout": chunks if parallel.pipeline > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence,
        # Packed micro-batches differ in length, so stages announce shapes before activations.
        "variable_seq_lengths": True,
        # Interleaved stages send in both directions at once; batched calls would deadlock.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _device_settings(arch: Architecture, model: ModelConfig) -> dict[str, Any]:
    on_gpu = accelerator.has_gpu()
    has_apex_kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    is_clamped = arch.experts is not None and arch.experts.swiglu_limit is not None
    return {
        "use_cpu_initialization": not on_gpu and accelerator.device() == torch.device("cpu"),
        # Fusions are CUDA kernels, or torch.compile, which costs minutes on a CPU. This one clamps before it adds the
        # bias of local layers; Transformer Engine's have added theirs by then.
        "bias_activation_fusion": on_gpu
        and arch.activation == "silu"
        and (uses_transformer_engine(model) or not is_clamped),
        # Makes Megatron take the activation from the layer spec: on the CPU our own SwiGLU.
        "use_te_activation_func": not on_gpu and arch.activation == "silu" and not is_clamped,
        "masked_softmax_fusion": False,
        # Megatron's grouped experts refuse it beside biases of theirs.
        "bias_dropout_fusion": on_gpu and not arch.has_all_biases,
        # Megatron's fused rotary embedding of latent attention exists for YaRN only; the other one has no magnitude.
        "apply_rope_fusion": on_gpu
        and uses_transformer_engine(model)
        and arch.latent_attention is None
        and arch.rotary_magnitude == 1.0,
        # Needs Apex's kernel that adds weight gradients to the float32 buffer within the matrix product.
        "gradient_accumulation_fusion": on_gpu and has_apex_kernel,
    }


def _expert_settings(arch: Architecture, model: ModelConfig, compute: ComputeConfig) -> dict[str, Any]:
    # Megatron checks the dispatcher against variable lengths for dense models too.
    settings: dict[str, Any] = {
        "moe_token_dispatcher_type": "alltoall",
        "activation_func": _ACTIVATIONS[arch.activation],
    }
    if arch.experts is None:
        return settings
    experts, moe = arch.experts, compute.moe
    if experts.swiglu_limit is not None:
        settings |= {
            "activation_func": quick_gelu,
            "activation_func_clamp_value": experts.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
    settings |= {
        "num_moe_experts": experts.number,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [int(arch.has_experts(layer)) for layer in range(arch.num_layers)]
        if experts.dense_layers
        else 1,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_shared_expert_gate": experts.gates_shared,
        "moe_router_topk": experts.per_token,
        # Softmax over all experts; then the chosen weights are scaled to sum to 1 if the model does so.
        "moe_router_score_function": experts.scores,
        "moe_router_pre_softmax": experts.scores == "softmax" and not experts.normalised,
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_router_num_groups": experts.groups.number if experts.groups else None,
        "moe_router_group_topk": experts.groups.per_token if experts.groups else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss_coefficient else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
        "moe_z_loss_coeff": moe.z_loss_coefficient or None,
        "moe_router_enable_expert_bias": experts.has_router_bias or moe.router_bias_update_rate > 0,
        "moe_router_bias_update_rate": moe.router_bias_update_rate,
        # One grouped matrix product for all experts, if Transformer Engine is there.
        "moe_grouped_gemm": uses_transformer_engine(model),
        "moe_router_padding_for_quantization": compute.fp8.enabled,
    }
    return settings


def _latent_attention_settings(arch: Architecture) -> dict[str, Any]:
    latent = arch.latent_attention
    if latent is None:
        return {}
    settings = {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.unrotated_head_dim,
        "qk_pos_emb_head_dim": latent.rotated_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rotary_base": arch.rope_theta,
    }
    scaling = arch.rope_scaling
    if scaling is None:
        return settings | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    assert isinstance(scaling, YarnScaling)
    assert latent.yarn_weights
    rotated, whole = latent.yarn_weights
    return settings | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": rotated,
        "mscale_all_dim": whole,
    }


def _delta_settings(arch: Architecture) -> dict[str, Any]:
    delta = arch.gated_delta
    if delta is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(arch.has_delta(layer)) for layer in range(arch.num_layers)],
        "linear_conv_kernel_dim": delta.conv_kernel,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
    }


def _recompute_settings(compute: ComputeConfig) -> dict[str, Any]:
    if compute.recompute == "none":
        return {}
    if compute.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(compute.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": compute.recompute_layers,
    }


def _fp8_settings(arch: Architecture, compute: ComputeConfig) -> dict[str, Any]:
    fp8 = compute.fp8
    if not fp8.enabled:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.scaling,
        "fp8_param": fp8.params,
        "fp8_amax_history_len": fp8.amax_history,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": fp8.bf16_layers_at_ends > 0,
        "num_layers_at_start_in_bf16": fp8.bf16_layers_at_ends,
        "num_layers_at_end_in_bf16": fp8.bf16_layers_at_ends,
    }
