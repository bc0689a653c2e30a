"""Causal attention over packed sequences with torch's own kernels, also where the tokens of each sequence are spread
over context-parallel processes. Transformer Engine does the same on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor


@dataclass(frozen=True)
class SegmentBucket:
    """Segments of similar length, right-padded to one [n, L] block: `gather` holds packed positions, flat."""

    gather: Tensor
    shape: tuple[int, int]
    valid: Tensor


@dataclass(frozen=True)
class ContextPiece:
    """One of this process's pieces of a segment: local query positions, and how many of the segment's first keys,
    from `first_key` of the whole micro-batch on, they may see; the last query sees all of them."""

    queries: slice
    first_key: int
    num_keys: int


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters with the attention plan of the CPU, made once per micro-batch."""

    buckets: tuple[SegmentBucket, ...] = ()
    restore: Tensor | None = None
    pieces: tuple[ContextPiece, ...] = ()
    key_order: Tensor | None = None


def packed_segments(
    cu_seqlens: Tensor, max_seqlen: int, *, plan_attention: bool, context_rank: int = 0, context_size: int = 1
) -> PackedSegments:
    """Describe one packed micro-batch to the layers; `plan_attention` prepares `PackedAttention`'s gathering.

    `cu_seqlens` and `max_seqlen` are those of the whole micro-batch; under context parallelism every segment's length
    is a multiple of 2 x context_size.
    """
    segments = PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    if plan_attention and context_size == 1:
        segments.buckets, segments.restore = _plan_buckets(cu_seqlens)
    elif plan_attention:
        segments.pieces, segments.key_order = _plan_pieces(cu_seqlens, context_rank, context_size)
    return segments


def _plan_buckets(cu_seqlens: Tensor) -> tuple[tuple[SegmentBucket, ...], Tensor]:
    buckets: list[SegmentBucket] = []
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens.diff().long()
    order = torch.argsort(lengths, descending=True, stable=True)
    packed_order = []
    position = 0
    while position < len(order):
        longest = int(lengths[order[position]])
        # A block wastes at most a third of its rows' attention on padding.
        members = order[position:][lengths[order[position:]] * 3 >= longest * 2]
        offsets = torch.arange(longest, device=starts.device)
        valid = offsets[None] < lengths[members][:, None]
        gather = starts[members][:, None] + torch.where(valid, offsets[None], 0)
        buckets.append(SegmentBucket(gather.flatten(), (len(members), longest), valid.flatten().nonzero()[:, 0]))
        packed_order.append(gather[valid])
        position += len(members)
    return tuple(buckets), torch.argsort(torch.cat(packed_order))


def _plan_pieces(cu_seqlens: Tensor, rank: int, size: int) -> tuple[tuple[ContextPiece, ...], Tensor]:
    """This process's pieces, `rank` and `2 size - 1 - rank` of every segment's 2 x size, and the positions of the whole
    micro-batch's keys in what all processes' keys make one after the other."""
    pieces: list[ContextPiece] = []
    where: list[Tensor] = []
    total = int(cu_seqlens[-1])
    per_process = total // size
    local = 0
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        piece = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            if piece:
                pieces.append(ContextPiece(slice(local, local + piece), start, (number + 1) * piece))
            local += piece
        owners = [number if number < size else 2 * size - 1 - number for number in range(2 * size)]
        first = start // size
        for number, owner in enumerate(owners):
            offset = owner * per_process + first + (piece if number >= size else 0)
            where.append(torch.arange(offset, offset + piece))
    return tuple(pieces), torch.cat(where).to(cu_seqlens.device)


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed sequences [T, heads, head_dim] with torch's fused kernels.

    Segments of similar length are padded on the right into one block; under a causal mask no real position
    sees the padding behind it, so the result is exact. Under context parallelism keys and values of all processes are
    gathered first.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor:
        """[T, heads * head_dim] from query [T, heads, d] and key, value [T, groups, d]; T are this process's tokens."""
        assert packed_seq_params is not None
        if packed_seq_params.key_order is not None:
            return self._attend_pieces(query, key, value, packed_seq_params)
        assert packed_seq_params.restore is not None
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for bucket in packed_seq_params.buckets:
            q, k, v = (_blocks(tensor, bucket) for tensor in (query, key, value))
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
            outputs.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.valid))
        return torch.cat(outputs).index_select(0, packed_seq_params.restore).flatten(1)

    def _attend_pieces(self, query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        # One gathering for keys and values; its backward pass sums their gradients over the processes.
        stacked = gather_from_sequence_parallel_region(torch.cat([key, value], dim=1), group=group)
        assert segments.key_order is not None
        keys, values = stacked.index_select(0, segments.key_order).split(key.shape[1], dim=1)
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for piece in segments.pieces:
            seen = slice(piece.first_key, piece.first_key + piece.num_keys)
            q = query[piece.queries].transpose(0, 1)[None]
            k, v = (tensor[seen].repeat_interleave(repeat, dim=1).transpose(0, 1)[None] for tensor in (keys, values))
            visible = torch.ones(q.shape[2], piece.num_keys, dtype=torch.bool, device=q.device)
            visible = visible.tril(piece.num_keys - q.shape[2])
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.softmax_scale)
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def _blocks(tensor: Tensor, bucket: SegmentBucket) -> Tensor:
    """[n, heads, L, d] from packed [T, heads, d]."""
    return tensor.index_select(0, bucket.gather).unflatten(0, bucket.shape).transpose(1, 2)
