"""Checks whether a configuration's ways of computing apply to a model, and can run on this machine."""

from __future__ import annotations

import os

import torch

from dapo_mega.config import ComputeConfig, ModelConfig
from dapo_mega.distributed import accelerator
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.layers import uses_transformer_engine
from dapo_mega.models import Architecture

# The CUDA compute capability that each kind of FP8 scaling needs.
_FP8_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0)}
_BLOCKWISE_CUDA = (12, 9)


def check_compute(arch: Architecture, model: ModelConfig, compute: ComputeConfig) -> None:
    """Raises InputError for settings that do not apply to this model or cannot run on this machine."""
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
            f"compute.moe.router_bias_update_rate needs a model with sigmoid router scores (as DeepSeek-V3), but "
            f"{arch.model_type} uses a softmax; use compute.moe.aux_loss_coefficient"
        )
    if accelerator.has_gpu() and model.dtype == "fp32" and compute.optimizer_offload > 0:
        raise InputError(
            f"compute.optimizer_offload={compute.optimizer_offload} is not supported by Megatron's offloading "
            "optimizer for weights in float32, which have no second copy that it could keep in host memory; "
            "set it to 0, or model.dtype=bf16"
        )
    check_fp8(model, compute)


def use_deterministic_algorithms() -> None:
    """Make PyTorch, cuBLAS, Transformer Engine and NCCL bit-reproducible. Call it before they are used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)


def check_fp8(model: ModelConfig, compute: ComputeConfig) -> None:
    """Raises InputError with the reason if FP8 is set and cannot run here."""
    scaling = compute.fp8.scaling
    if scaling == "none":
        return
    reason = None
    if not accelerator.has_gpu():
        reason = "this machine has no CUDA device"
    elif not uses_transformer_engine(model):
        reason = "the transformer-engine package is not installed"
    else:
        capability = accelerator.capability()
        if capability < _FP8_CAPABILITY[scaling]:
            reason = f"this device has compute capability {capability}, {_FP8_CAPABILITY[scaling]} is needed"
        elif scaling == "blockwise" and accelerator.cuda_version() < _BLOCKWISE_CUDA:
            version, needed = (".".join(map(str, pair)) for pair in (accelerator.cuda_version(), _BLOCKWISE_CUDA))
            reason = f"torch was built for CUDA {version}, CUDA {needed} is needed"
    if reason:
        raise InputError(
            f"compute.fp8.scaling={scaling} cannot run here: {reason}; set compute.fp8.scaling=none (bf16), or run on "
            f"Hopper or newer GPUs with Transformer Engine"
        )
