"""cuDNN's fused attention and the fused rotation of Transformer Engine's extension, over packed sequences."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.te_cpu import rehearsed

from .enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from .quantization import DType

_CAUSAL = {
    NVTE_Mask_Type.NVTE_CAUSAL_MASK: "top left",
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK: "top left",
    NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK: "bottom right",
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK: "bottom right",
}


_ASKED = (
    "is_training qkv_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type dropout num_attn_heads "
    "num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk head_dim_v window_size_left window_size_right"
)


def get_fused_attn_backend(*asked: Any) -> Any:
    """What cuDNN 9.18 on Hopper would answer for packed sequences of bfloat16, the only ones emulated here. 2.11 and
    2.16 ask with arguments; newer versions with one record, and they are also told why there is no backend."""
    if len(asked) > 1:
        return _backend(SimpleNamespace(**dict(zip(_ASKED.split(), asked, strict=False))))
    return _backend(asked[0]), "not emulated"


def _backend(asked: Any) -> NVTE_Fused_Attn_Backend:
    head_dims = (asked.head_dim_qk, asked.head_dim_v)
    head_dims_fit = all(dim % 8 == 0 for dim in head_dims) and (
        max(head_dims) <= 128
        or (
            max(head_dims) <= 256
            and not (
                asked.is_training
                and asked.head_dim_qk != asked.head_dim_v
                and min(head_dims) >= 128
                and head_dims != (192, 128)
            )
        )
    )
    supported = (
        asked.qkv_dtype in (DType.kBFloat16, DType.kFloat16)
        and asked.qkv_layout.name.startswith(("NVTE_THD_T", "NVTE_T3HD", "NVTE_TH3D"))
        and asked.bias_type == NVTE_Bias_Type.NVTE_NO_BIAS
        and asked.softmax_type != NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX
        and asked.attn_mask_type.name.startswith("NVTE_PADDING")
        and asked.dropout == 0.0
        and head_dims_fit
        and (asked.window_size_left == -1 or (asked.attn_mask_type in _CAUSAL and asked.window_size_right == 0))
    )
    backend = NVTE_Fused_Attn_Backend
    return backend.NVTE_F16_arbitrary_seqlen if supported else backend.NVTE_No_Backend  # type: ignore[attr-defined]


def _without_formats(rest: tuple[Any, ...], num_formats: int) -> tuple[Any, ...]:
    """The arguments after the layout as 2.11 has them. Newer versions put names of formats before them, and after the
    window whether the mask ends in the bottom right corner."""
    if not isinstance(rest[0], NVTE_QKV_Format):
        return rest
    bias_type, mask, softmax_type, window, is_bottom_right, *others = rest[num_formats:]
    assert mask not in _CAUSAL or is_bottom_right == (_CAUSAL[mask] == "bottom right")
    return (bias_type, mask, softmax_type, window, *others)


def _segments(cu: Tensor, padded: Tensor | None) -> list[tuple[int, int]]:
    starts = (cu if padded is None else padded)[:-1].tolist()
    return list(zip(starts, cu.diff().tolist(), strict=True))


def _scores(q: Tensor, k: Tensor, scale: float, mask: NVTE_Mask_Type, window: tuple[int, int]) -> Tensor:
    """[heads, queries, keys] float32; -inf where a query does not see a key."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    num_q, num_k = scores.shape[1:]
    shift = num_k - num_q if _CAUSAL.get(mask) == "bottom right" else 0
    distance = torch.arange(num_k)[None] - torch.arange(num_q)[:, None] - shift
    left, right = window
    if mask in _CAUSAL:
        right = 0
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return scores.masked_fill(~seen, -math.inf)


def _seen(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, mask: NVTE_Mask_Type) -> int:
    """Pairs of queries and keys; of causal masks half of them."""
    pairs = sum(q * k for q, k in zip(cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist(), strict=True))
    return pairs // 2 if mask in _CAUSAL else pairs


def _check(qkv_layout: NVTE_QKV_Layout, bias_type: NVTE_Bias_Type, dropout: float) -> None:
    if not qkv_layout.name.startswith(("NVTE_THD_T", "NVTE_T3HD", "NVTE_TH3D")):
        raise NotImplementedError(f"transformer_engine_torch.fused_attn with {qkv_layout.name}")
    if bias_type != NVTE_Bias_Type.NVTE_NO_BIAS or dropout:
        raise NotImplementedError("transformer_engine_torch.fused_attn with a bias or dropout")


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    *rest: Any,
) -> list[Tensor]:
    """Output [T, heads, e], log-sum-exp [T, heads, 1] and the state of a random generator that was not used; learnable
    sinks [1, heads, 1, 1] are handed on."""
    bias_type, attn_mask_type, _, window_size, cu_seqlens_q, cu_seqlens_kv, q, k, v, *rest = _without_formats(rest, 2)
    _, cu_seqlens_q_padded, cu_seqlens_kv_padded, *_ = rest
    sinks = rest[8]
    kept = [] if sinks is None else [sinks]
    _check(qkv_layout, bias_type, p_dropout)
    for name, cu, longest in (("q", cu_seqlens_q, max_seqlen_q), ("kv", cu_seqlens_kv, max_seqlen_kv)):
        assert cu.dtype == torch.int32, f"cu_seqlens_{name} must be int32"
        assert int(cu.diff().max()) <= longest, f"a sequence is longer than max_seqlen_{name}"
    assert q.dim() == k.dim() == v.dim() == 3
    output = q.new_zeros(*q.shape[:-1], v.shape[-1])
    stats = q.new_zeros(*q.shape[:-1], 1, dtype=torch.float32)
    random_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if q.is_meta:
        rehearsed.count(2 * _seen(cu_seqlens_q, cu_seqlens_kv, attn_mask_type) * q.shape[1] * (q.shape[2] + v.shape[2]))
        return [output, stats, random_state, *kept]
    repeat = q.shape[1] // k.shape[1]
    for (q_start, q_len), (k_start, k_len) in zip(
        _segments(cu_seqlens_q, cu_seqlens_q_padded), _segments(cu_seqlens_kv, cu_seqlens_kv_padded), strict=True
    ):
        queries, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        wide = [part.float().repeat_interleave(repeat, 1) for part in (k[keys], v[keys])]
        scores = _scores(q[queries].float(), wide[0], attn_scale, attn_mask_type, window_size)
        lse = scores.logsumexp(-1, keepdim=True)
        lse = lse if sinks is None else torch.logaddexp(lse, sinks[0])
        weights = (scores - lse.nan_to_num(neginf=0.0)).exp()
        output[queries] = torch.einsum("hqk,khe->qhe", weights, wide[1]).to(q.dtype)
        stats[queries] = lse.transpose(0, 1)
    return [output, stats, random_state, *kept]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    *rest: Any,
) -> list[Tensor | None]:
    """Gradients of q, k and v, none of a bias, and that of learnable sinks [1, heads, 1, 1]."""
    bias_type, attn_mask_type, _, window_size, _, cu_seqlens_q, cu_seqlens_kv, *rest = _without_formats(rest, 5)
    q, k, v, o, d_o, *rest = rest
    aux, cu_seqlens_q_padded, cu_seqlens_kv_padded, *_ = (x for x in rest if not isinstance(x, torch.dtype | DType))
    _check(qkv_layout, bias_type, p_dropout)
    stats, _, *sinks = aux
    of_sinks = torch.zeros_like(sinks[0]) if sinks else None
    gradients = [torch.zeros(part.shape, dtype=part.dtype, device=part.device) for part in (q, k, v)]
    if q.is_meta:
        rehearsed.count(4 * _seen(cu_seqlens_q, cu_seqlens_kv, attn_mask_type) * q.shape[1] * (q.shape[2] + v.shape[2]))
        return [*gradients, None, of_sinks]
    groups, repeat = k.shape[1], q.shape[1] // k.shape[1]
    for (q_start, q_len), (k_start, k_len) in zip(
        _segments(cu_seqlens_q, cu_seqlens_q_padded), _segments(cu_seqlens_kv, cu_seqlens_kv_padded), strict=True
    ):
        queries, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        wide_q, wide_o, wide_do = (part[queries].float() for part in (q, o, d_o))
        wide_k, wide_v = (part[keys].float().repeat_interleave(repeat, 1) for part in (k, v))
        scores = _scores(wide_q, wide_k, attn_scale, attn_mask_type, window_size)
        weights = (scores - stats[queries].transpose(0, 1).nan_to_num(neginf=0.0)).exp()
        of_weights = torch.einsum("qhe,khe->hqk", wide_do, wide_v)
        share = (wide_o * wide_do).sum(-1).t().unsqueeze(-1)
        if of_sinks is not None:
            of_sinks[0] -= ((sinks[0][0] - stats[queries].transpose(0, 1)).exp() * share).sum(1, keepdim=True)
        of_scores = weights * (of_weights - share) * attn_scale
        of_q = torch.einsum("hqk,khd->qhd", of_scores, wide_k)
        of_k = torch.einsum("hqk,qhd->khd", of_scores, wide_q)
        of_v = torch.einsum("hqk,qhe->khe", weights, wide_do)
        gradients[0][queries] = of_q.to(q.dtype)
        for gradient, wide in ((gradients[1], of_k), (gradients[2], of_v)):
            gradient[keys] = wide.view(k_len, groups, repeat, -1).sum(2).to(gradient.dtype)
    return [*gradients, None, of_sinks]


def _packed(tensor: Tensor, cu_seqlens: Tensor) -> list[tuple[slice, slice]]:
    lengths = cu_seqlens.diff().tolist()
    starts = cu_seqlens[:-1].tolist()
    return [(slice(s, s + n), slice(0, n)) for s, n in zip(starts, lengths, strict=True)]


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    output = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for row, (tokens, places) in enumerate(_packed(tensor, cu_seqlens)):
        output[row, places] = tensor[tokens]
    return output


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    output = tensor.new_zeros(t, *tensor.shape[2:])
    for row, (tokens, places) in enumerate(_packed(tensor, cu_seqlens)):
        output[tokens] = tensor[row, places]
    return output


def _positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Position in its sequence of each of this process's tokens; a sequence's pieces are rank and 2 cp - 1 - rank."""
    positions = []
    for length in (cu_seqlens // cp_size).diff().tolist():
        here = torch.arange(length)
        if cp_size > 1:
            assert length % 2 == 0
            half = length // 2
            first = here[:half] + cp_rank * half
            here = torch.cat([first, here[:half] + (2 * cp_size - 1 - cp_rank) * half])
        positions.append(here)
    return torch.cat(positions)


def _rope(
    tensor: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    direction: float,
) -> Tensor:
    if qkv_format != NVTE_QKV_Format.NVTE_THD or interleaved or start_positions is not None:
        raise NotImplementedError(f"transformer_engine_torch.fused_rope with {qkv_format}, interleaved={interleaved}")
    assert cu_seqlens is not None
    assert (tensor.dim(), freqs.dim(), freqs.shape[1:3], freqs.dtype) == (3, 4, (1, 1), torch.float32)
    positions = _positions(cu_seqlens, cp_size, cp_rank)
    assert len(positions) == len(tensor), "cu_seqlens does not end where the tokens do"
    assert int(positions.max()) < len(freqs), "a position has no frequencies: out of bounds on a device"
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    angles = freqs[:, 0, 0][positions][:, None]
    rotated, rest = tensor[..., : angles.shape[-1]].float(), tensor[..., angles.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    turned = rotated * angles.cos() + direction * torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned.to(tensor.dtype), rest], -1)


def fused_rope_forward(tensor: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    return _rope(tensor, freqs, *rest, direction=1.0)


def fused_rope_backward(gradient: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    if len(rest) == 5:  # Until 2.9 without start positions.
        rest = (None, *rest)
    return _rope(gradient, freqs, *rest, direction=-1.0)
