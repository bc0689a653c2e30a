"""Shards the tensors of a Hugging Face checkpoint for tensor parallelism, and merges the shards.

Megatron stores q, k and v as one matrix ordered by query group (the group's query heads, its key, its value)
and gate and up projections as one matrix per rank; Hugging Face keeps them apart, or one after the other. With more
ranks than groups it cuts that matrix just as evenly, through the groups: each rank holds an equal run of its group's
rows, and its attention gathers the products. Everything here is exact:
values are moved, never computed.

Experts that checkpoints hold in one tensor, in floating point or in MXFP4 (gpt-oss), are apart within the package:
the part of each expert is a tensor of its own, with the expert's number in its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from dapo_mega.models.architecture import Architecture

_STACK = re.compile(r"(.*\.mlp\.experts\.)((?:gate_up|down)_proj(?:_bias)?)")
_PART = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of the two tensors end that hold a stack in MXFP4."""
# The numbers of the format E2M1 by their four bits: sign, exponent, mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])
_EXPONENT_BIAS = 127


class ShardRule(Enum):
    """How one Megatron parameter is made of one or more Hugging Face tensors."""

    REPLICATED = "replicated"
    """The same on every tensor-parallel rank."""
    COLUMN = "column"
    """[out, in] cut along `out` (ColumnParallelLinear)."""
    ROW = "row"
    """[out, in] cut along `in` (RowParallelLinear)."""
    TRANSPOSED_ROW = "transposed_row"
    """The same parameter as ROW, of a tensor [in, out]."""
    VOCAB = "vocab"
    """[vocab, hidden] padded with zeros to a multiple of the ranks, cut along vocab."""
    QKV = "qkv"
    """Weights or biases of q, k, v interleaved by query group, cut along the rows: between groups, or within each."""
    GATE_UP = "gate_up"
    """Gate and up projections; each rank holds its piece of gate, then its piece of up."""
    GATED_QKV = "gated_qkv"
    """Like QKV, where q holds each head's query and then its output gate; a group's gates follow its queries."""
    DELTA = "delta"
    """One after the other the rows of a gated delta layer's q, k, v, and of its gate, beta and decay or of none; each
    rank holds its piece of each."""
    DELTA_BY_HEAD = "delta_by_head"
    """The same parameter as DELTA, of two tensors by key head: q, k, v, gate; and beta, decay."""
    FUSED_QKV = "fused_qkv"
    """The same parameter as QKV, of one tensor that holds all of q, then k, then v."""
    FUSED_GATE_UP = "fused_gate_up"
    """The same parameter as GATE_UP, of one tensor that holds all of gate, then up."""
    INTERLEAVED_GATE_UP = "interleaved_gate_up"
    """The same parameter as GATE_UP, of one tensor whose rows are of gate and up in turn."""
    TRANSPOSED_INTERLEAVED_GATE_UP = "transposed_interleaved_gate_up"
    """The same parameter as GATE_UP, of one tensor [in, 2 out] whose columns are of gate and up in turn."""


INTERLEAVED = (ShardRule.INTERLEAVED_GATE_UP, ShardRule.TRANSPOSED_INTERLEAVED_GATE_UP)
GATED = (ShardRule.GATE_UP, ShardRule.FUSED_GATE_UP, *INTERLEAVED)
DELTA = (ShardRule.DELTA, ShardRule.DELTA_BY_HEAD)
ROWS = (ShardRule.ROW, ShardRule.TRANSPOSED_ROW)


def take_shard(tensors: Sequence[Tensor], layout: ShardRule, arch: Architecture, tp_rank: int, tp_size: int) -> Tensor:
    """This rank's Megatron tensor from the full Hugging Face tensors, given in the rule's order."""
    if layout is ShardRule.REPLICATED:
        return tensors[0]
    if layout is ShardRule.COLUMN:
        return tensors[0].chunk(tp_size)[tp_rank]
    if layout in ROWS:
        rows = tensors[0] if layout is ShardRule.ROW else tensors[0].t()
        return rows.chunk(tp_size, dim=1)[tp_rank]
    if layout is ShardRule.VOCAB:
        height = arch.padded_vocab_size(tp_size) // tp_size
        shard = tensors[0][tp_rank * height : (tp_rank + 1) * height]
        padding = height - len(shard)
        return torch.nn.functional.pad(shard, (0, 0, 0, padding)) if padding else shard
    if layout in GATED:
        return torch.cat([tensor.chunk(tp_size)[tp_rank] for tensor in gate_and_up(tensors, layout)])
    if layout in DELTA:
        whole = _from_key_heads(tensors, arch) if layout is ShardRule.DELTA_BY_HEAD else torch.cat(list(tensors))
        return torch.cat([part.chunk(tp_size)[tp_rank] for part in whole.split(delta_sections(len(whole), arch))])
    if layout is ShardRule.FUSED_QKV:
        keys = arch.num_query_groups * arch.head_dim
        tensors = tensors[0].split([arch.num_attention_heads * arch.head_dim, keys, keys])
    groups = arch.num_query_groups
    rest = tensors[0].shape[1:]
    if layout is ShardRule.GATED_QKV:
        queries = tensors[0].reshape(groups, -1, 2, arch.head_dim, *rest).transpose(1, 2)
        tensors = [queries.reshape(-1, *rest), *tensors[1:]]
    by_group = [tensor.reshape(groups, -1, *rest) for tensor in tensors]
    first = groups * tp_rank // tp_size
    mine = [tensor[first : first + max(1, groups // tp_size)] for tensor in by_group]
    ranks_per_group = max(1, tp_size // groups)
    return torch.cat(mine, dim=1).reshape(-1, *rest).chunk(ranks_per_group)[tp_rank % ranks_per_group]


def gate_and_up(tensors: Sequence[Tensor], layout: ShardRule) -> Sequence[Tensor]:
    """Gate and up projections of one of the rules GATED apart, each with its rows first."""
    if layout is ShardRule.FUSED_GATE_UP:
        return tensors[0].chunk(2)
    if layout in INTERLEAVED:
        rows = tensors[0] if layout is ShardRule.INTERLEAVED_GATE_UP else tensors[0].t()
        return rows[::2], rows[1::2]
    return tensors


def merge_shards(shards: Sequence[Tensor], layout: ShardRule, arch: Architecture) -> list[Tensor]:
    """The full Hugging Face tensors from all ranks' Megatron tensors: the inverse of `take_shard`.

    Of a single shard they may be views.
    """
    if layout is ShardRule.REPLICATED:
        return [shards[0]]
    if layout is ShardRule.COLUMN:
        return [_joined(shards)]
    if layout is ShardRule.ROW:
        return [_joined(shards, dim=1)]
    if layout is ShardRule.TRANSPOSED_ROW:
        return [_joined(shards, dim=1).t()]
    if layout is ShardRule.VOCAB:
        return [_joined(shards)[: arch.vocab_size]]
    if layout is ShardRule.FUSED_GATE_UP:
        return [torch.cat(merge_shards(shards, ShardRule.GATE_UP, arch))]
    if layout in INTERLEAVED:
        rows = torch.stack(merge_shards(shards, ShardRule.GATE_UP, arch), dim=1).flatten(0, 1)
        return [rows if layout is ShardRule.INTERLEAVED_GATE_UP else rows.t()]
    if layout is ShardRule.FUSED_QKV:
        return [torch.cat(merge_shards(shards, ShardRule.QKV, arch))]
    if layout is ShardRule.GATE_UP:
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[i] for half in halves]) for i in (0, 1)]
    if layout in DELTA:
        sizes = delta_sections(sum(map(len, shards)), arch)
        parts = [shard.split([size // len(shards) for size in sizes]) for shard in shards]
        sections = [_joined(pieces) for pieces in zip(*parts, strict=True)]
        if layout is ShardRule.DELTA_BY_HEAD:
            return _to_key_heads(sections, arch)
        return [torch.cat(sections[:3]), *sections[3:]]
    rest = shards[0].shape[1:]
    full = _joined(shards).reshape(arch.num_query_groups, -1, *rest)
    queries = arch.num_attention_heads // arch.num_query_groups * arch.head_dim
    if layout is ShardRule.GATED_QKV:
        gated, *others = full.split([2 * queries, arch.head_dim, arch.head_dim], dim=1)
        by_head = gated.unflatten(1, (2, -1, arch.head_dim)).transpose(1, 2)
        return [by_head.flatten(0, 3), *(part.flatten(0, 1) for part in others)]
    return [part.flatten(0, 1) for part in full.split([queries, arch.head_dim, arch.head_dim], dim=1)]


def delta_sections(num_rows: int, arch: Architecture) -> list[int]:
    """Rows of the parts of a DELTA parameter of all ranks together: of the projection, or of the convolution."""
    assert arch.gated_delta
    sections = arch.gated_delta.sections
    return sections if num_rows == sum(sections) else sections[:3]


def _from_key_heads(tensors: Sequence[Tensor], arch: Architecture) -> Tensor:
    """q, k, v, gate, beta and decay one after the other."""
    assert arch.gated_delta
    heads = arch.gated_delta.num_key_heads
    sizes = [rows // heads for rows in arch.gated_delta.sections]
    by_head = zip(tensors, (sizes[:4], sizes[4:]), strict=True)
    parts = [part for tensor, rows in by_head for part in tensor.unflatten(0, (heads, -1)).split(rows, dim=1)]
    return torch.cat([part.flatten(0, 1) for part in parts])


def _to_key_heads(sections: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
    assert arch.gated_delta
    by_head = [section.unflatten(0, (arch.gated_delta.num_key_heads, -1)) for section in sections]
    return [torch.cat(parts, dim=1).flatten(0, 1) for parts in (by_head[:4], by_head[4:])]


def _joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)


def part_name(stack: str, expert: int) -> str | None:
    """The name of an expert's part of a tensor; None if that is no stack of experts."""
    found = _STACK.fullmatch(stack)
    return found and f"{found[1]}{expert}.{found[2]}"


def stack_name(part: str) -> str:
    """The name on disk of what a tensor is, or is a part of."""
    found = _PART.fullmatch(part)
    return found[1] + found[3] if found else part


def stacks(names: Iterable[str]) -> dict[str, list[str]]:
    """The names on disk of tensors, each with those of its parts in the order given."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(stack_name(name), []).append(name)
    return parts


def stacked(tensors: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[Tensor]:
    """The tensors as they are on disk. The parts of a stack follow each other, experts in any order."""
    parts: dict[int, Tensor] = {}
    for name, tensor in tensors:
        found = _PART.fullmatch(name)
        if found is None:
            yield tensor
            continue
        parts[int(found[2])] = tensor
        if len(parts) == num_experts:
            yield torch.stack([parts[expert] for expert in range(num_experts)])
            parts = {}


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """An expert's weight [32 G, rows] in bfloat16 from MXFP4: blocks [rows, G, 16] of two numbers a byte, the lower
    half first, and the exponents [rows, G] that the numbers of a block share. OCP Microscaling Formats 1.0, section 5.
    Exact: every product is a number of bfloat16.
    """
    numbers = _E2M1[torch.stack([blocks & 15, blocks >> 4], dim=-1).int()].flatten(-2)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - _EXPONENT_BIAS).flatten(1).to(torch.bfloat16).t()
