"""The layer spec is the only switch between GPU and CPU: Transformer Engine layers, or Megatron's local ones
with our RMSNorm and our packed attention. Both take the same packed micro-batches."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from dapo_mega.config import ComputeConfig, ModelConfig
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture
from dapo_mega.policy.packed_attention import PackedAttention


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm. Megatron's WrappedTorchNorm refuses sequence parallelism; this one marks its weight
    so that Megatron sums the weight's gradient over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        # In float32 and with the weight applied after the cast back, as transformers does it.
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


def uses_transformer_engine(config: ModelConfig) -> bool:
    """Whether this machine gets Transformer Engine layers; refuses them where they cannot run."""
    available = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if config.layer_implementation == "transformer_engine" and not available:
        raise InputError(
            "model.layer_implementation=transformer_engine needs a CUDA device and the transformer-engine package; "
            "install it or set model.layer_implementation=local"
        )
    return available and config.layer_implementation != "local"


# What each kind of FP8 scaling needs: CUDA compute capability.
_FP8_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0)}


def check_compute(arch: Architecture, model: ModelConfig, compute: ComputeConfig) -> None:
    """Refuse what this model has no use for, and what this machine cannot run, with the reason."""
    if arch.experts is None:
        asked = [name for name in compute.recompute_modules if name.startswith(("moe", "shared"))]
        if compute.recompute == "selective" and asked:
            raise InputError(
                f"compute.recompute_modules={asked} need a mixture-of-experts model, not {arch.model_type}"
            )
        if compute.moe != type(compute.moe)():
            raise InputError(f"compute.moe is for mixture-of-experts models, {arch.model_type} is not one; remove it")
    elif compute.moe.router_bias_update_rate > 0 and arch.experts.scores != "sigmoid":
        raise InputError(
            f"compute.moe.router_bias_update_rate needs a model whose router scores are sigmoids (DeepSeek-V3's way), "
            f"those of {arch.model_type} are a softmax; use compute.moe.aux_loss_coefficient"
        )
    check_fp8(model, compute)


def use_deterministic_algorithms() -> None:
    """The same bits every time, of PyTorch, cuBLAS, Transformer Engine and NCCL. Call it before they are used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)


def check_fp8(model: ModelConfig, compute: ComputeConfig) -> None:
    """Refuse FP8 where it cannot run, with the reason."""
    scaling = compute.fp8.scaling
    if scaling == "none":
        return
    reason = None
    if not torch.cuda.is_available():
        reason = "this machine has no CUDA device"
    elif not uses_transformer_engine(model):
        reason = "the transformer-engine package is not installed"
    else:
        capability = torch.cuda.get_device_capability()
        if capability < _FP8_CAPABILITY[scaling]:
            reason = f"this device has compute capability {capability}, {_FP8_CAPABILITY[scaling]} is needed"
    if reason:
        raise InputError(
            f"compute.fp8.scaling={scaling} cannot run here: {reason}; set compute.fp8.scaling=none (bf16), or run on "
            f"Hopper or newer GPUs with Transformer Engine"
        )


def block_spec(
    config: TransformerConfig, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules | ModuleSpec:
    """Layers of one model chunk: this pipeline stage's, or its `vp_stage`-th part."""
    kinds: dict[str, Any] = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**kinds)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **kinds)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    if config.num_moe_experts:
        # The norm before experts is a layer of its own in checkpoints of Transformer Engine layers too.
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
