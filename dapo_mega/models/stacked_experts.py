"""Experts that checkpoints hold in one tensor of all, in floating point or in MXFP4 (gpt-oss).

Within the package the part of each expert is a tensor of its own, with the expert's number in its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_STACK = re.compile(r"(.*\.mlp\.experts\.)((?:gate_up|down)_proj(?:_bias)?)")
_PART = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of the two tensors end that hold a stack in MXFP4."""
# The numbers of the format E2M1 by their four bits: sign, exponent, mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])
_EXPONENT_BIAS = 127


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
