"""Deterministic inference (`--enable-deterministic-inference`) on CPUs, for which SGLang 0.5.23 has no kernels.

SGLang refuses the option with the attention that CPUs have, multiplies by Triton kernels, and hashes seeds by a kernel
of its CPU package, which has no build for most machines. Remove a part when SGLang offers it on CPUs.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

_ATTENTION = "torch_native"  # Request by request, so that others change nothing.
_ROWS = 8
_MASK = 0xFFFFFFFF
_BATCH_INVARIANT_OPS = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
_overrides: list[torch.library.Library] = []


def offer_determinism() -> None:
    """Let an engine on the CPU take the option. Raises ImportError or AttributeError where SGLang is another one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args = importlib.import_module("sglang.srt.server_args")
    if _ATTENTION not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices([_ATTENTION])
    importlib.import_module("sgl_kernel")
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        library = torch.library.Library("sgl_kernel", "FRAGMENT")
        library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
        library.impl("murmur_hash32_cpu", hashed, "CPU")
        _overrides.append(library)
    HookRegistry.register(_BATCH_INVARIANT_OPS, multiply_rows_alike, HookType.REPLACE)


def multiply_rows_alike(*_: Any, **__: Any) -> None:
    """Compute products of matrices by `product` from now on, in this process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU")
    library.impl("addmm", product_and_sum, "CPU")
    _overrides.append(library)


def product(left: Tensor, right: Tensor) -> Tensor:
    """[N, K] times [K, M], in blocks of a fixed number of rows: how a row is rounded depends on no other row, and not
    on how many there are."""
    num_rows = len(left)
    padded = left.new_zeros(math.ceil(num_rows / _ROWS) * _ROWS, left.shape[1])
    padded[:num_rows] = left
    blocks = padded.view(-1, _ROWS, left.shape[1])
    return torch.bmm(blocks, right.expand(len(blocks), -1, -1)).flatten(0, 1)[:num_rows]


def product_and_sum(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * added + alpha * left @ right`, by `product`."""
    result = product(left, right)
    return (result if alpha == 1 else alpha * result) + (added if beta == 1 else beta * added)


def hashed(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bits) of seed [N] (64 bits), position [N] and column [M] (32 bits each): [N, M] int64 of 32
    bits."""
    seeds = seed.view(torch.int64)
    state = torch.zeros_like(seeds)
    for word in (seeds & _MASK, (seeds >> 32) & _MASK, positions.long() & _MASK):
        state = _mixed(state, word)
    state = _mixed(state[:, None], columns.long()[None] & _MASK) ^ 16  # Bytes hashed.
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _mixed(state: Tensor, word: Tensor) -> Tensor:
    """Products may overflow 64 bits; their last 32 are right nevertheless."""
    word = _rotated((word * 0xCC9E2D51) & _MASK, 15) * 0x1B873593 & _MASK
    return (_rotated(state ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _rotated(value: Tensor, num_bits: int) -> Tensor:
    return ((value << num_bits) | (value >> (32 - num_bits))) & _MASK
