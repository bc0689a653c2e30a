"""Ring attention's corrections in Transformer Engine's extension. Under context parallelism each process holds two
pieces of every packed sequence, here called its halves; steps of the ring see both or one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Positions of the first (0) or second (1) halves of all sequences."""
    starts, lengths = cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    pieces = [
        torch.arange(s + half * (n // 2), s + half * (n // 2) + n // 2) for s, n in zip(starts, lengths, strict=True)
    ]
    return torch.cat(pieces).to(cu_seqlens.device)


def _token_dim(tensor: Tensor) -> int:
    return tensor.dim() - 3


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    return tensor.index_select(_token_dim(tensor), _half(cu_seqlens, half_idx))


def thd_second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    if not packed:
        raise NotImplementedError("transformer_engine_torch.thd_second_half_lse_correction of unpacked sums")
    second = _half(cu_seqlens, 1)
    lse[:, second] = torch.logaddexp(lse[:, second], lse_per_step[:, : len(second)].to(lse.dtype))


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, second_half_lse_seqlen: int) -> Tensor:
    if not packed:
        raise NotImplementedError("transformer_engine_torch.thd_read_second_half_lse of unpacked sums")
    second = _half(cu_seqlens, 1)
    result = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    result[:, : len(second)] = lse[:, second]
    return result


def thd_out_correction(out: Tensor, out_per_step: Tensor, *others: Any) -> None:
    """Adds a step's output by its share of the whole. From 2.20 on `out` is the whole of the steps before this one,
    made smaller by its own share, and their sum comes first among the others; before, it is the sum of shares."""
    *before, lse, lse_per_step, cu_seqlens, only_second_half, packed = others
    if not packed:
        raise NotImplementedError("transformer_engine_torch.thd_out_correction of unpacked sums")
    tokens = _half(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    step = out_per_step.view(-1, *out.shape[1:])[: len(tokens)]
    corrected = out[tokens].float()
    for earlier in before:
        corrected = corrected * _share(earlier[:, tokens], lse[:, tokens])
    corrected += step.float() * _share(lse_per_step[:, : len(tokens)], lse[:, tokens])
    out[tokens] = corrected.to(out.dtype)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """[tokens, heads, 1] of logarithms [heads, tokens]."""
    return (part - whole).exp().t().unsqueeze(-1)


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Each half of `grad` is left as it is ("none"), or the step's gradient is added or copied to it."""
    dim = _token_dim(grad)
    halves = [_half(cu_seqlens, 0), _half(cu_seqlens, 1)]
    is_whole = "none" not in (first_half, second_half)
    for what, tokens in zip((first_half, second_half), halves, strict=True):
        if what == "none":
            continue
        step = grad_per_step.index_select(dim, tokens) if is_whole else grad_per_step.narrow(dim, 0, len(tokens))
        if what == "add":
            grad.index_add_(dim, tokens, step)
        else:
            grad.index_copy_(dim, tokens, step)
