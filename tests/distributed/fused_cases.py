"""Inputs that the test of vocabulary-parallel fused log-probs and its worker share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """`padded` columns are cut over the ranks; those from `vocab` on are padding."""

    name: str
    tokens: int = 30
    vocab: int = 37
    padded: int = 40
    temperature: float = 1.0
    scale: float = 1.0
    with_entropy: bool = True
    chunk: int | None = 7
    dtype: torch.dtype = torch.float32


CASES = [
    Case("padding_on_the_last_rank"),
    Case("last_rank_is_padding_only", vocab=15),
    Case("cold_and_large_logits", temperature=0.01, scale=30.0),
    Case("hot", temperature=100.0),
    Case("without_entropy", with_entropy=False, chunk=None),
    Case("no_tokens", tokens=0),
    Case("bf16", dtype=torch.bfloat16, scale=0.3),
]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, 8], padded weight [V, 8] and targets [N]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(case.tokens, 8, generator=generator) * case.scale
    weight = torch.randn(case.padded, 8, generator=generator)
    targets = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
    return hidden.to(case.dtype), weight.to(case.dtype), targets


def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A sum with a different weight for each log-prob and entropy."""
    factors = torch.linspace(-1, 2, 2 * len(logprobs), dtype=logprobs.dtype).view(2, -1)
    return (factors[0] * logprobs + factors[1] * entropy).sum()
