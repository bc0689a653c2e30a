"""Rotary frequencies and their scaling for longer contexts, from the configurations of transformers 4 and 5.

The frequencies have the bits of transformers' `ROPE_INIT_FUNCTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo_mega.errors import InputError


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv:2306.15595): every frequency is divided by `factor`."""

    factor: float

    @property
    def attention_factor(self) -> float:
        return 1.0

    def inverse_frequencies(self, theta: float, dim: int) -> Tensor:
        return unscaled_frequencies(theta, dim) / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths above `original_positions / low_freq_factor` are stretched by `factor`, those below
    `original_positions / high_freq_factor` are kept, and in between both are mixed."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    @property
    def attention_factor(self) -> float:
        return 1.0

    def inverse_frequencies(self, theta: float, dim: int) -> Tensor:
        kept = unscaled_frequencies(theta, dim)
        rotations = self.original_positions / (2 * math.pi / kept)
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mixed = (1 - share) * kept / self.factor + share * kept
        wavelengths = 2 * math.pi / kept
        is_long = wavelengths > self.original_positions / self.low_freq_factor
        is_short = wavelengths < self.original_positions / self.high_freq_factor
        return torch.where(is_long, kept / self.factor, torch.where(is_short, kept, mixed))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, section 3): dimensions that turn less than `beta_slow` times within the original context
    are interpolated, those that turn more than `beta_fast` times are kept, with a linear ramp in between."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int
    truncate: bool
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""
    attention_factor: float
    """What rotated queries and keys are multiplied by."""

    def inverse_frequencies(self, theta: float, dim: int) -> Tensor:
        powers = theta ** (torch.arange(0, dim, 2).float() / dim)
        first, last = (self._dimension(turns, theta, dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first or 0.001
        kept = 1 - ((torch.arange(dim // 2).float() - first) / width).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _dimension(self, turns: float, theta: float, dim: int) -> float:
        """The dimension that turns `turns` times within the original context."""
        return (dim * math.log(self.original_positions / (turns * 2 * math.pi))) / (2 * math.log(theta))


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (arXiv:2402.13753) up to the original context: every frequency is divided by a factor of its own. Longer
    sequences have other factors, so that their frequencies would depend on the length."""

    factors: tuple[float, ...]
    attention_factor: float

    def inverse_frequencies(self, theta: float, dim: int) -> Tensor:
        powers = theta ** (torch.arange(0, dim, 2).float() / dim)
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * powers)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling


def unscaled_frequencies(theta: float, dim: int) -> Tensor:
    """Angles per position [dim / 2] in float32 of the pairs of `dim` rotated dimensions."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))


def rope_sizes(raw: Mapping[str, Any], *, may_be_partial: bool) -> dict[str, Any]:
    """The fields of `Architecture` about rotation from a `config.json`; InputError for rotations that are not
    supported. `may_be_partial` tells whether transformers' code of the family rotates a part of each head."""
    # transformers 4 writes rope_theta and rope_scaling, transformers 5 one record rope_parameters.
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise InputError(
            f"rope_parameters by kind of layer ({', '.join(nested)}) are not supported for {raw['model_type']}; "
            "only one record for all layers is"
        )
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial > 1.0 or (partial < 1.0 and not may_be_partial):
        only = "at most 1.0" if may_be_partial else "only 1.0"
        raise InputError(f"partial_rotary_factor={partial} is not supported for {raw['model_type']}; {only} is")
    original = (
        raw.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or raw["max_position_embeddings"]
    )
    scaling = _scaling(rope, raw, original)
    return {
        "partial_rotary_factor": partial,
        "rope_theta": float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        "rope_scaling": scaling,
        "max_positions": original if isinstance(scaling, LongScaling) else raw["max_position_embeddings"],
    }


def of_full_attention(raw: Mapping[str, Any], windowed_theta: float) -> tuple[dict[str, Any], float]:
    """A `config.json` with the rotation of its layers of full attention only, and the base of those with a sliding
    window, which is `windowed_theta` unless the file tells. These must be unscaled."""
    records = raw.get("rope_parameters") or {}
    windowed = records.get("sliding_attention") or {}
    if (kind := windowed.get("rope_type", "default")) != "default":
        raise InputError(
            f"rope scaling of type {kind!r} in layers of sliding_attention is not supported for {raw['model_type']}; "
            "only default is"
        )
    if "full_attention" in records or "sliding_attention" in records:
        raw = {**raw, "rope_parameters": records.get("full_attention")}
    return dict(raw), float(windowed.get("rope_theta") or windowed_theta)


def _scaling(rope: Mapping[str, Any], raw: Mapping[str, Any], original: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    if kind == "yarn":
        factor = rope["factor"] or raw["max_position_embeddings"] / original
        return YarnScaling(
            factor=factor,
            beta_fast=rope.get("beta_fast") or 32,
            beta_slow=rope.get("beta_slow") or 1,
            original_positions=original,
            truncate=rope.get("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    if kind == "longrope":
        factor = rope.get("factor") or raw["max_position_embeddings"] / original
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        given = rope.get("attention_factor")
        return LongScaling(tuple(rope["short_factor"]), magnitude if given is None else float(given))
    raise InputError(
        f"rope scaling of type {kind!r} is not supported for {raw['model_type']}, only default, linear, llama3, yarn "
        "and longrope are: frequencies must not depend on a sequence's length"
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if numerator and denominator:
        return yarn_magnitude(factor, numerator) / yarn_magnitude(factor, denominator)
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1: how YaRN (section 3.4) sharpens the attention of a context stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
