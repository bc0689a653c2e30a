"""Drawing tokens: pure functions from logits and uniform random numbers to tokens and their log-probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_DRAWS_PER_COUNT = 4
"""Philox-4x64 yields four 64-bit words for each value of its counter."""


def request_uniforms(seed: int, count: int, start: int = 0) -> npt.NDArray[np.float64]:
    """Numbers `start` to `start + count` of the stream in [0, 1) that depends on `seed` only.

    Counter-based (Philox), so any part of the stream is computed without the parts before it. Raises ValueError for a
    seed outside of 0 to 2**128 - 1.
    """
    skipped = start % _DRAWS_PER_COUNT
    stream = np.random.Generator(np.random.Philox(key=seed, counter=start // _DRAWS_PER_COUNT))
    return stream.random(skipped + count)[skipped:]


def sample_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF draws from softmax(logits / temperature) filtered by top-k, then top-p: (tokens, log-probs).

    `logits` [B, V]; `uniforms` [B] in [0, 1] on their device, one number per row. Tokens are [B] int64. Log-probs are
    [B] float32 in nats under the unfiltered softmax(logits / temperature), as SGLang reports them. `temperature` 0
    takes the most probable token, with its log-prob at temperature 1. `top_k` 0 means no limit; `top_p` is the share of
    the top-k's mass. Raises FloatingPointError for logits that define no distribution (NaN, +inf, all -inf).
    """
    num_tokens = logits.shape[-1]
    probs = torch.softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = probs.argmax(dim=-1, keepdim=True)
    elif top_p == 1 and (top_k == 0 or top_k >= num_tokens):
        tokens = _inverse_cdf(probs, uniforms)
    else:
        weights, candidates = _filter(probs, top_p, min(top_k or num_tokens, num_tokens))
        tokens = candidates.gather(1, _inverse_cdf(weights, uniforms))
    drawn = probs.gather(1, tokens).squeeze(1)
    if not bool((drawn > 0).all()):
        rows = (~(drawn > 0)).nonzero().flatten().tolist()
        raise FloatingPointError(f"logits of rows {rows[:8]} define no distribution: NaN, +inf or all -inf")
    return tokens.squeeze(1), drawn.log()


def _filter(probs: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Candidates by falling probability: (probabilities with the removed ones at 0, token ids), both [B, K]."""
    if top_k < probs.shape[-1]:
        weights, candidates = probs.topk(top_k, dim=-1)
    else:
        weights, candidates = probs.sort(dim=-1, descending=True, stable=True)
    if top_p < 1:
        shares = _fixed_point(weights)
        mass = shares.cumsum(dim=-1)
        # A candidate stays while the mass before it falls short of top_p, so the first one always does.
        weights = weights.masked_fill((mass - shares).double() >= top_p * mass[:, -1:].double(), 0.0)
    return weights, candidates


def _fixed_point(weights: Tensor) -> Tensor:
    """Probabilities as int64 multiples of 2**-62. Their sums are exact, so a parallel scan (GPU) never falls and is
    deterministic; torch refuses to scan floats there under `compute.deterministic`."""
    return (weights.double() * 2.0**62).long()


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Per row the first index [B, 1] whose cumulative weight exceeds uniform * total; never one of weight 0."""
    cdf = _fixed_point(weights).cumsum(dim=-1)
    total = cdf[:, -1]
    # Below the total even when the uniform is 1 or rounds to 1, so the index found has positive weight.
    target = torch.minimum((uniforms.double() * total.double()).long(), total - 1)
    return torch.searchsorted(cdf, target.unsqueeze(1), right=True).clamp_(max=weights.shape[-1] - 1)
