"""In the place of flash-linear-attention's Triton kernels: functions that keep for their backward passes what those do,
and compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_mega.megatron.core.repairs.since_0_18 import gated_delta

_CHUNK = 64


def stand_in(monkeypatch: Any) -> None:
    """Until the test ends, gated delta layers that are built without kernels get these."""
    monkeypatch.setattr(gated_delta, "_rule", lambda q, k, v, *, g, beta, **_: (_Rule.apply(q, k, v, g, beta), None))
    monkeypatch.setattr(gated_delta, "_convolution", lambda x, weight, *_, **__: (_Convolution.apply(x, weight), None))
    monkeypatch.setattr(gated_delta, "_l2norm", _Norm.apply)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Keeps its inputs, the decay summed up in float32, and a row of each chunk's inverse matrix for each token."""
        q, k, v, beta = (part.contiguous() for part in (q, k, v, beta))
        sums = torch.empty_like(g, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, sums, beta, k.new_empty(*k.shape[:3], _CHUNK))
        ctx.decay = g.dtype
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, _ = ctx.saved_tensors
        return *map(torch.empty_like, (q, k, v)), torch.empty_like(g, dtype=ctx.decay), torch.empty_like(beta)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])
