"""LoRA and the experts of tokens on engines on CPUs: SGLang 0.5.23 puts them into pinned memory, which only GPUs have.

Remove it when SGLang asks whether there is such memory.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")
_FACTORIES = ("empty", "tensor", "zeros")


class _WithoutPinning(ModuleType):
    """torch, whose factories ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in _FACTORIES:
            return found
        return lambda *values, pin_memory=False, **settings: found(*values, **settings)


def allow_adapters() -> None:
    """Let SGLang's LoRA do without pinned memory. Raises ImportError where SGLang is another one."""
    for name in _MODULES:
        importlib.import_module(name).torch = _WithoutPinning("torch")  # type: ignore[attr-defined]
    Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]


def allow_routes() -> None:
    """Let SGLang keep the experts of tokens without pinned memory. Raises ImportError where SGLang is another one."""
    functions = importlib.import_module("sglang.srt.mem_cache.pool_host.common").ALLOC_MEMORY_FUNCS
    allocate = functions["cpu"]
    functions["cpu"] = lambda *sizes, pin_memory=False, **settings: allocate(*sizes, pin_memory=False, **settings)
