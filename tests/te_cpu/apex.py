"""NVIDIA Apex's fused_weight_gradient_mlp_cuda, emulated: weight gradients added to their float32 buffer."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

NAME = "fused_weight_gradient_mlp_cuda"
_ACCUMULATE = 14
"""Position of `accumulate` among the arguments of generic_gemm."""


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """As if the extension had been there when Megatron-Core was imported; `num_calls` of the module counts."""
    from megatron.core.tensor_parallel import layers

    module: Any = types.ModuleType(NAME)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    module.num_calls = 0

    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        module.num_calls += 1
        tokens, width = inputs.reshape(-1, inputs.shape[-1]).shape
        # The kernel reads memory as it comes.
        assert all(tensor.is_contiguous() for tensor in (inputs, grad_output, main_grad))
        assert inputs.dtype == grad_output.dtype
        assert main_grad.dtype == torch.float32
        assert main_grad.shape == (grad_output.shape[-1], width)
        main_grad += grad_output.reshape(tokens, -1).float().t() @ inputs.reshape(tokens, width).float()

    def wgrad_gemm_accum_fp16(*arguments: torch.Tensor) -> None:
        raise NotImplementedError(f"{NAME}.wgrad_gemm_accum_fp16 is not emulated: gradients here are float32")

    module.wgrad_gemm_accum_fp32, module.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, NAME, module)
        patch.setattr(layers, NAME, module, raising=False)
        patch.setattr(layers, "_grad_accum_fusion_available", True)
        yield module


@contextlib.contextmanager
def used_by_local_layers() -> Iterator[None]:
    with installed() as module:
        yield
    assert module.num_calls > 0


@contextlib.contextmanager
def used_by_transformer_engine() -> Iterator[None]:
    """Its own products add to the buffer, as Megatron tells it to where the extension is."""
    from tests.te_cpu import extension

    real, accumulated = extension.generic_gemm, 0

    def generic_gemm(*arguments: Any, **options: Any) -> Any:
        nonlocal accumulated
        accumulated += bool(arguments[_ACCUMULATE])
        return real(*arguments, **options)

    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "generic_gemm", generic_gemm)
        yield
    assert accumulated > 0
