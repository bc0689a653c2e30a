"""The encoding of weights for engines with `dapo_mega.sglang_plugin`, shared by trainer and plugin.

pieces     several pieces; each holds the bytes of some of the bucket's tensors, one after the other
changes    two pieces: the number of bytes in the second one, and the second one: first the number of values sent
           of each tensor, then the checksum of each whole tensor, then for each tensor either all values, or the
           positions and the values of the changed ones

Numbers are int64, positions int32; each part starts at a multiple of 8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_mega.types import WeightSpec

PROTOCOL = 7
"""Increase it with every change after which one side no longer understands the other."""
PROTOCOL_FIELD = "dapo_mega_protocol"
"""The field of a server's internal state that holds the plugin's protocol."""
MODEL_FIELD = "dapo_mega_model"
"""The field that holds the server's model configuration: the text of a `config.json`."""
OTHER_MODEL = "its model is not the policy's"
"""The start of an engine's error when the weights sent are another model's."""
CHANGES_FORMAT = "dapo_mega_changes"
_PIECES_FORMAT = "dapo_mega_pieces:"
_LIMIT = re.compile(r"-within-(\d+)ms(-|$)")
_ALL = -1
_ALIGNMENT = 8
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def limited_group(name: str, limit_s: float) -> str:
    """A process group's name that contains the time limit for joining it, as SGLang has no field for a limit."""
    return f"{name}-within-{max(1, round(1000 * limit_s))}ms"


def limit_of_group(name: str) -> float | None:
    """The limit in seconds that `limited_group` wrote into the name; None if there is none."""
    found = _LIMIT.search(name)
    return int(found[1]) / 1000 if found else None


@dataclass(frozen=True)
class PiecesFormat:
    """The load format of a bucket in pieces; piece i holds `lengths[i]` tensors. Beside the piece that it loads, an
    engine receives further pieces while they fit into `window_bytes`, and always at least one."""

    lengths: tuple[int, ...]
    window_bytes: int

    def __str__(self) -> str:
        return f"{_PIECES_FORMAT}{self.window_bytes}:{','.join(map(str, self.lengths))}"

    @classmethod
    def parse(cls, load_format: str) -> PiecesFormat | None:
        """The inverse of `str`; None for any other format."""
        if not load_format.startswith(_PIECES_FORMAT):
            return None
        window_bytes, lengths = load_format.removeprefix(_PIECES_FORMAT).split(":")
        return cls(tuple(map(int, lengths.split(","))), int(window_bytes))


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of the dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def weight_specs(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[WeightSpec]:
    """The specs of the tensors in a call to an engine; `dtypes` as `dtype_name` gives them."""
    return [
        WeightSpec(name, getattr(torch, dtype), tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def split_specs(specs: Sequence[WeightSpec], piece_lengths: Sequence[int]) -> list[list[WeightSpec]]:
    """The tensors of each piece."""
    rest = iter(specs)
    return [[next(rest) for _ in range(length)] for length in piece_lengths]


def unpacked(piece: Tensor, specs: Sequence[WeightSpec]) -> Iterator[Tensor]:
    """The tensors of a piece [bytes] uint8, as views of it."""
    start = 0
    for spec in specs:
        end = start + spec.num_bytes
        yield piece[start:end].view(spec.dtype).view(spec.shape)
        start = end


def checksum(tensor: Tensor) -> Tensor:
    """The sum of all values' bits, [] int64; it does not change when a tensor is cut, transposed or fused with
    others."""
    return tensor.view(_BITS[tensor.dtype.itemsize]).sum(dtype=torch.int64)


def differing(new: Tensor, held: Tensor) -> Tensor:
    """Where the bits of two tensors of one dtype and shape differ, bool in that shape."""
    bits = _BITS[new.dtype.itemsize]
    return new.view(bits) != held.view(bits)


def find_changes(new: Tensor, held: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """(places [n] int32, values [n]) where the bits of `new` and `held` differ; (None, all values) if that is smaller
    or `held` is None."""
    # A tensor of one value may be read as a number instead of being copied.
    can_have_places = new.is_floating_point() and 1 < new.numel() <= torch.iinfo(torch.int32).max
    if held is None or not can_have_places:
        return None, new
    places = differing(new, held).flatten().nonzero().flatten().int()
    if places.nbytes + len(places) * new.dtype.itemsize >= new.nbytes:
        return None, new
    return places, new.flatten()[places]


def pack_changes(changes: Sequence[tuple[Tensor | None, Tensor]], checksums: Sequence[Tensor]) -> Tensor:
    """[bytes] uint8: the result of `find_changes` for each tensor of a bucket, with the checksums of the whole
    tensors."""
    counts = [_ALL if places is None else len(places) for places, _ in changes]
    device = changes[0][1].device
    parts = [torch.tensor(counts, dtype=torch.int64, device=device), torch.stack(list(checksums))]
    for places, values in changes:
        parts += [values] if places is None else [places, values]
    packed = torch.empty(sum(_aligned(part.nbytes) for part in parts), dtype=torch.uint8, device=device)
    start = 0
    for part in parts:
        packed[start : start + part.nbytes] = part.flatten().view(torch.uint8)
        start += _aligned(part.nbytes)
    return packed


def most_packed_bytes(specs: Sequence[WeightSpec]) -> int:
    """The most that `pack_changes` makes of these tensors: a tensor's changes are never larger than all its values."""
    return sum(spec.num_bytes + 4 * _ALIGNMENT for spec in specs) + 2 * _ALIGNMENT


@dataclass(frozen=True)
class Change:
    """Values of one tensor: all values [shape], or the values [n] at `places` [n] int32. `checksum` is the whole new
    tensor's."""

    values: Tensor
    places: Tensor | None
    checksum: int


def unpack_changes(packed: Tensor, specs: Sequence[WeightSpec]) -> Iterator[Change]:
    """The inverse of `pack_changes`; values are views of `packed`."""
    start = 0

    def take(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal start
        taken = packed[start : start + count * dtype.itemsize].view(dtype)
        start += _aligned(taken.nbytes)
        return taken

    counts = take(torch.int64, len(specs)).tolist()
    checksums = take(torch.int64, len(specs)).tolist()
    for spec, count, expected in zip(specs, counts, checksums, strict=True):
        if count == _ALL:
            yield Change(take(spec.dtype, spec.size).view(spec.shape), None, expected)
        else:
            places = take(torch.int32, count)
            yield Change(take(spec.dtype, count), places, expected)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
