"""Builds the Megatron-Core model of this process's pipeline stage from a Hugging Face architecture."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from dapo_mega.config import ModelConfig, ParallelConfig
from dapo_mega.models import Architecture
from dapo_mega.policy.layer_specs import block_spec, uses_transformer_engine


def transformer_config(arch: Architecture, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron's description of `arch` in the given layout and precision."""
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
    config = TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence,
        # Packed micro-batches differ in length, so stages announce shapes before activations.
        variable_seq_lengths=True,
        # Megatron checks this against variable lengths for dense models too.
        moe_token_dispatcher_type="alltoall",
        # The token-level denominator belongs to Megatron: losses are sums, divided once by the global count.
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        # Weights always come from a checkpoint, but Megatron marks parameters as tensor-parallel only while it
        # initialises them, and the gradient norm needs those marks.
        perform_initialization=True,
        # Fusions are CUDA kernels, or torch.compile, which costs minutes on a CPU.
        bias_activation_fusion=on_gpu,
        masked_softmax_fusion=False,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=on_gpu and uses_transformer_engine(model),
        gradient_accumulation_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def build_stage(arch: Architecture, config: TransformerConfig, model: ModelConfig) -> torch.nn.Module:
    """The (uninitialised) layers of this pipeline stage, in the model's dtype."""
    stage: torch.nn.Module = GPTModel(
        config,
        block_spec(config, uses_transformer_engine(model)),
        vocab_size=arch.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
    )
    if torch.cuda.is_available():
        stage.cuda(torch.cuda.current_device())
    return Float16Module(config, stage) if config.bf16 else stage


def with_gradients(stage: torch.nn.Module, config: TransformerConfig) -> DistributedDataParallel:
    """Megatron's DDP around a stage: contiguous gradient buffers, reduce-scatter for the distributed optimizer."""
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            check_for_nan_in_grad=True,
        ),
        stage,
    )


def unwrapped(stage: Any) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    while not isinstance(stage, GPTModel):
        stage = stage.module
    return stage
