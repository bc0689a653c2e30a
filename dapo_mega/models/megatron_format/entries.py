"""Under which names and shapes Megatron's format stores parameters, and how layouts cut them into blocks."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# Megatron's writer fills the same private record: torch has no public one.
from dapo_mega.models import Architecture, ModelFamily, ShardRule, take_shard
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.hf_checkpoint import all_tensors
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.models.layouts import DELTA, GATED, ROWS, delta_sections

Range = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block of a tensor."""

# Megatron stores the parts of a gated delta layer's projection, and of its convolution, each on its own.
DELTA_PARTS = ("query", "key", "value", "z", "beta", "alpha")
_LAYER = re.compile(r"(?<=^decoder\.layers\.)(\d+)\.")
_FUSED_NORM = ".layer_norm_weight"
_LINEAR_WEIGHT = re.compile(r".+\.(?:linear_\w+|in_proj|out_proj)\.weight")


@dataclass(frozen=True)
class Entry:
    """Where one parameter is stored: at `index` of the leading axes, of sizes `stack`, of the tensor `key`."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def stored_entries(family: ModelFamily, arch: Architecture) -> dict[PlacedTensor, Entry]:
    """The place of every parameter of the model, in checkpoint order."""
    tensors = list(all_tensors(family, arch))
    names = {name for placed in tensors for name in placed.megatron}
    stacked = _layers_are_alike(family, arch)
    return {placed: _entry(placed, names, arch, stacked) for placed in tensors}


def stored_shape(placed: PlacedTensor, arch: Architecture) -> tuple[int, ...]:
    """Shape of a parameter of one process that holds all of it, vocabulary not padded."""
    full = [torch.empty(hf_shape(name, arch), device="meta") for name in placed.hf]
    return tuple(take_shard(full, placed.layout, arch, 0, 1).shape)


def _layers_are_alike(family: ModelFamily, arch: Architecture) -> bool:
    def parameters(layer: int) -> set[str]:
        tensors = family.tensors(arch, range(layer, layer + 1), False, False)
        return {_LAYER.sub("", name) for placed in tensors for name in placed.megatron}

    if arch.gated_delta:
        return False
    return all(parameters(layer) == parameters(0) for layer in range(1, arch.num_layers))


def _entry(placed: PlacedTensor, names: set[str], arch: Architecture, stacked: bool) -> Entry:
    key = _key(placed, names)
    index, stack = [], []
    layer = _LAYER.search(key)
    if layer and stacked:
        key = _LAYER.sub("", key)
        index.append(int(layer[1]))
        stack.append(arch.num_layers)
    if placed.expert is not None:
        assert arch.experts
        key = key.replace(f".local_experts.{placed.expert}.", ".experts.")
        index.append(placed.expert)
        stack.append(arch.experts.number)
    return Entry(key, tuple(index), tuple(stack))


def _key(placed: PlacedTensor, names: set[str]) -> str:
    """Checkpoints of both kinds of layers name a norm by the linear layer that Transformer Engine fuses it into."""
    fused = next((name for name in placed.megatron if name.endswith(_FUSED_NORM)), None)
    if fused is not None and fused.replace(_FUSED_NORM, ".weight") in names:
        return fused
    return placed.megatron[0]


def cuts(layout: ShardRule, shape: Sequence[int], arch: Architecture, rank: int, size: int) -> list[Range]:
    """The blocks of a parameter of this shape that one of `size` tensor-parallel processes stores."""
    whole = (0,) * len(shape)
    if layout is ShardRule.REPLICATED:
        return [(whole, tuple(shape))] if rank == 0 else []
    axis = 1 if layout in ROWS else 0
    count = 2 if layout in GATED else 1
    sections = delta_sections(shape[0], arch) if layout in DELTA else [shape[axis] // count] * count
    blocks, first = [], 0
    for section in sections:
        span = section // size
        offsets = (*whole[:axis], first + rank * span, *whole[axis + 1 :])
        blocks.append((offsets, (*shape[:axis], span, *shape[axis + 1 :])))
        first += section
    return blocks


def delta_part(key: str, shape: Sequence[int], offset: int, arch: Architecture) -> tuple[str, tuple[int, ...], int]:
    """Of a DELTA parameter of this key and shape the part that has a row: its key, its shape, and its first row."""
    start = 0
    for name, rows in zip(DELTA_PARTS, delta_sections(shape[0], arch), strict=False):
        if offset < start + rows:
            return f"{key}.{name}", (rows, *shape[1:]), start
        start += rows
    raise AssertionError(key)


def no_extra_state(entries: Mapping[PlacedTensor, Entry]) -> dict[str, bytes]:
    """The empty `_extra_state` objects that Megatron's linear layers expect beside their weights."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    keys = set()
    for entry in entries.values():
        if _LINEAR_WEIGHT.fullmatch(entry.key):
            index, stack = entry.index or (0,), entry.stack or (1,)
            shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, stack))}"
            keys.add(f"{entry.key.removesuffix('weight')}_extra_state/{shard}")
    return dict.fromkeys(sorted(keys), buffer.getvalue())
