"""Gated delta layers without flash-linear-attention."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_CHUNK = 64


def has_kernels() -> bool:
    """Whether Megatron computes these layers with flash-linear-attention's Triton kernels."""
    return bool(gated_delta_net.HAVE_FLA) and gated_delta_net.l2norm is not _l2norm


def compute_without_kernels() -> None:
    """Megatron builds no such layer without Triton kernels, and its functions for torch alone refuse packed sequences.
    Here they get one batch of sequences after the other. Can go when its own take `cu_seqlens`."""
    functions = {
        "HAVE_FLA": True,
        "chunk_gated_delta_rule": _rule,
        "causal_conv1d": _convolution,
        "l2norm": _l2norm,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith(gated_delta_net.__name__):
            vars(module).update({key: value for key, value in functions.items() if key in vars(module)})


def _rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Any, ...]:
    def compute(*rows: Tensor) -> Tensor:
        output: Tensor = gated_delta_net.torch_chunk_gated_delta_rule(*rows, chunk_size=_CHUNK)[0]
        return output

    return _by_sequence(compute, (q, k, v, g, beta), cu_seqlens), None


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, Tensor | None]:
    def compute(rows: Tensor) -> Tensor:
        padded = F.pad(rows.transpose(1, 2), (weight.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)

    return _by_sequence(compute, (x,), cu_seqlens), None


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _by_sequence(compute: Callable[..., Tensor], packed: Sequence[Tensor], cu_seqlens: Tensor) -> Tensor:
    """`compute` of the sequences of tensors [1, T, ...], those together that have as many chunks, padded on the right
    where nothing before it is changed."""
    lengths = cu_seqlens.diff().tolist()
    parts = [tensor[0].split(lengths) for tensor in packed]
    alike = defaultdict(list)
    for number, length in enumerate(lengths):
        alike[-(-length // _CHUNK)].append(number)
    outputs: list[Any] = [None] * len(lengths)
    for members in alike.values():
        rows = compute(*(pad_sequence([part[i] for i in members], batch_first=True) for part in parts))
        for number, row in zip(members, rows, strict=True):
            outputs[number] = row[: lengths[number]]
    return torch.cat(outputs)[None]
