"""Causal attention over packed sequences with torch's own kernels, with and without context parallelism. Transformer
Engine does the same on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from dapo_mega.megatron.core.groups import context_group, gathered_tokens
from dapo_mega.megatron.core.local_layers import CutByHeads


@dataclass(frozen=True)
class ContextPiece:
    """One of this rank's pieces of a segment: the local query positions, and the number of the segment's keys, from
    `first_key` of the whole micro-batch on, that the last query sees."""

    queries: slice
    first_key: int
    num_keys: int


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters with the attention plan of the CPU, made once per micro-batch."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [T, 1, r / 2] of this rank's tokens, for the first r dimensions of each head; None if queries
    and keys are rotated already."""
    windowed_rotary: tuple[Tensor, Tensor] | None = None
    """The same of layers with a sliding window."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Shapes [n, L] of blocks of segments of similar length, right-padded."""
    token_of_slot: Tensor | None = None
    """Packed position of every slot of all blocks, one block after the other; a padding slot repeats its segment's
    first token. None if all segments have one length, so that slots are tokens."""
    slot_of_token: Tensor | None = None
    pieces: tuple[ContextPiece, ...] = ()
    key_order: Tensor | None = None

    @property
    def plans_attention(self) -> bool:
        """Whether `PackedAttention`'s plan was made."""
        return bool(self.buckets or self.key_order is not None)


def packed_segments(
    cu_seqlens: Tensor, max_seqlen: int, *, plan_attention: bool, context_rank: int = 0, context_size: int = 1
) -> PackedSegments:
    """Megatron's description of one packed micro-batch; with `plan_attention` also the plan of `PackedAttention`.

    `cu_seqlens` and `max_seqlen` are the whole micro-batch's; under context parallelism every segment's length is a
    multiple of 2 x context_size.
    """
    segments = PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    if plan_attention and context_size == 1:
        segments.buckets, segments.token_of_slot, segments.slot_of_token = _plan_buckets(cu_seqlens)
    elif plan_attention:
        segments.pieces, segments.key_order = _plan_pieces(cu_seqlens, context_rank, context_size)
    return segments


def _plan_buckets(cu_seqlens: Tensor) -> tuple[tuple[tuple[int, int], ...], Tensor | None, Tensor | None]:
    """Blocks with the packed position of each slot and the slot of each packed position."""
    buckets: list[tuple[int, int]] = []
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens.diff().long()
    order = torch.argsort(lengths, descending=True, stable=True)
    tokens, is_token = [], []
    position = 0
    while position < len(order):
        longest = int(lengths[order[position]])
        # At most a fifth of a block's row is padding.
        members = order[position:][lengths[order[position:]] * 5 >= longest * 4]
        offsets = torch.arange(longest, device=starts.device)
        valid = offsets[None] < lengths[members][:, None]
        tokens.append((starts[members][:, None] + torch.where(valid, offsets[None], 0)).flatten())
        is_token.append(valid.flatten())
        buckets.append((len(members), longest))
        position += len(members)
    if len(buckets) == 1 and int(lengths.min()) == buckets[0][1]:
        return tuple(buckets), None, None
    token_of_slot = torch.cat(tokens)
    slots = torch.cat(is_token).nonzero()[:, 0]
    slot_of_token = torch.empty_like(slots)
    slot_of_token[token_of_slot[slots]] = slots
    return tuple(buckets), token_of_slot, slot_of_token


def _plan_pieces(cu_seqlens: Tensor, rank: int, size: int) -> tuple[tuple[ContextPiece, ...], Tensor]:
    """This rank's pieces, number `rank` and `2 size - 1 - rank` of each segment's 2 x size; and for each key of the
    whole micro-batch its position in the concatenation of all ranks' keys."""
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


class PackedAttention(CutByHeads):
    """Causal core attention over packed sequences [T, heads, head_dim] with torch's fused kernels, Megatron's
    `window_size`, if set, and attention sinks with `softmax_type="learnable"`.

    Segments of similar length are padded on the right into one block; under a causal mask no real position sees the
    padding behind it, so the result is exact. Under context parallelism the keys and values of all ranks are gathered
    first.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.softmax_scale = softmax_scale
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_windowed else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        # One entry per layer of the whole model; layers are counted from 1.
        self.rotates = not (config.no_rope_freq and config.no_rope_freq[layer_number - 1])

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
        """[T, heads * e] from query [T, heads, d], key [T, groups, d] and value [T, groups, e], e at most d; T counts
        this rank's tokens."""
        assert packed_seq_params is not None
        dtype = query.dtype
        if query.device.type == "cpu":
            # The CPU kernel is three to six times as slow in bfloat16 on sequences of some hundred tokens.
            query, key, value = query.float(), key.float(), value.float()
        rotary = packed_seq_params.windowed_rotary if self.window else packed_seq_params.rotary
        if rotary is not None and self.rotates:
            query, key = (_Rotate.apply(tensor, *rotary) for tensor in (query, key))
        # torch's fused kernels need equal head sizes, so pad the values with zeros and cut the output.
        missing = query.shape[-1] - value.shape[-1]
        attend = self._attend_blocks if packed_seq_params.key_order is None else self._attend_pieces
        output = attend(query, key, F.pad(value, (0, missing)) if missing else value, packed_seq_params)
        if missing:
            output = output.unflatten(1, query.shape[1:])[..., :-missing].flatten(1)
        return output.to(dtype)

    def _attend_blocks(self, query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments) -> Tensor:
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        sizes = [rows * length for rows, length in segments.buckets]
        if segments.token_of_slot is not None:
            query, key, value = (
                _ToSlots.apply(tensor, segments.token_of_slot, segments.slot_of_token) for tensor in (query, key, value)
            )
        blocks = [tensor.split(sizes) for tensor in (query, key, value)]
        outputs = []
        for shape, *parts in zip(segments.buckets, *blocks, strict=True):
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
            length = shape[1]
            is_windowed = self.window is not None and length > self.window
            visible = _visible(length, length, self.window, q.device) if is_windowed else None
            attended = self._attend(q, k, v, visible)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        if segments.slot_of_token is None:
            return outputs[0].flatten(1)
        output: Tensor = _FromSlots.apply(torch.cat(outputs).flatten(1), segments.slot_of_token)
        return output

    def _attend_pieces(self, query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments) -> Tensor:
        # One all-gather for keys and values; its backward pass sums their gradients over the ranks.
        stacked = gathered_tokens(torch.cat([key, value], dim=1), context_group())
        assert segments.key_order is not None
        keys, values = stacked.index_select(0, segments.key_order).split(key.shape[1], dim=1)
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for piece in segments.pieces:
            seen = slice(piece.first_key, piece.first_key + piece.num_keys)
            q = query[piece.queries].transpose(0, 1)[None]
            k, v = (tensor[seen].repeat_interleave(repeat, dim=1).transpose(0, 1)[None] for tensor in (keys, values))
            visible = _visible(q.shape[2], piece.num_keys, self.window, q.device)
            outputs.append(self._attend(q, k, v, visible)[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        """[rows, heads, queries, d]; without a mask `visible` [queries, keys] a causal one.

        A head's sink is a key in front of all others whose value is 0: its score comes from another dimension, in which
        all queries are 1. The query in front keeps the causal mask square.
        """
        scale = self.softmax_scale or query.shape[-1] ** -0.5
        if self.softmax_offset is not None:
            query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 0, 1, 0))
            key, value = F.pad(key, (0, 1, 1, 0)), F.pad(value, (0, 1, 1, 0))
            key[:, :, 0, -1] = self.softmax_offset.to(key) / scale
            visible = None if visible is None else F.pad(visible, (1, 0, 1, 0), value=True)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=scale
        )
        return output if self.softmax_offset is None else output[:, :, 1:, :-1]


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Mask [num_queries, num_keys]: the last query sees the last `window` keys (None: all), each before it one less."""
    shift = num_keys - num_queries
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(shift)
    return causal if window is None else causal.triu(shift - window + 1)


class _Rotate(torch.autograd.Function):
    """Rotary position embedding: each pair (x_i, x_{i + r/2}) of the first r dimensions is turned by its
    angle, the gradient back by it; the other dimensions stay."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(tensor, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(gradients[0], cosines, -sines), None, None


def _rotated(tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = cosines.shape[-1]
    first, second, rest = tensor.split([half, half, tensor.shape[-1] - 2 * half], dim=-1)
    turned = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    torch.mul(first, cosines, out=turned[..., :half]).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=turned[..., half : 2 * half]).addcmul_(first, sines)
    turned[..., 2 * half :] = rest
    return turned


class _ToSlots(torch.autograd.Function):
    """Packed tokens to slots. A token's gradient is that of its own slot, as padding slots have gradient 0: no real
    token sees them. index_select's own gradient would add rows one by one into zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token_of_slot: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        return tensor.index_select(0, token_of_slot)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slot_of_token,) = ctx.saved_tensors
        return gradients[0].index_select(0, slot_of_token), None, None


class _FromSlots(torch.autograd.Function):
    """Slots to packed tokens; padding slots get the gradient 0."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        ctx.num_slots = len(tensor)
        return tensor.index_select(0, slot_of_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (slot_of_token,) = ctx.saved_tensors
        gradient = gradients[0]
        slots = gradient.new_zeros(ctx.num_slots, *gradient.shape[1:])
        return slots.index_copy_(0, slot_of_token, gradient), None
