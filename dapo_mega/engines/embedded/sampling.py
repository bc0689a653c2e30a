"""Drawing tokens: pure functions from logits and uniform random numbers to tokens and their log-probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

_DRAWS_PER_COUNT = 4
"""Philox-4x64 yields four 64-bit words for each value of its counter."""

_BLOCK = 256
"""Columns of a large vocabulary that are drawn as one first: only the drawn block is looked at in float64."""

_LIKELIEST = 1024
"""Tokens that nearly always hold top_p of a large vocabulary's mass, so that the others need no sorting."""


def request_uniforms(seed: int, count: int, start: int = 0) -> npt.NDArray[np.float64]:
    """Numbers `start` to `start + count` of the stream in [0, 1) that depends on `seed` only.

    Counter-based (Philox), so any part of the stream is computed without the parts before it. Raises ValueError for a
    seed outside of 0 to 2**128 - 1.
    """
    skipped = start % _DRAWS_PER_COUNT
    stream = np.random.Generator(np.random.Philox(key=seed, counter=start // _DRAWS_PER_COUNT))
    return stream.random(skipped + count)[skipped:]


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF draws from softmax(logits / temperature) filtered by top-k, then top-p: (tokens, log-probs).

    `logits` [B, V]; `uniforms` [B] in [0, 1] on their device, one number per row. Tokens are [B] int64. Log-probs are
    [B] float32 in nats under the unfiltered softmax(logits / temperature), as SGLang reports them. `temperature` 0
    takes the most probable token, with its log-prob at temperature 1. `top_k` 0 means no limit; `top_p` is the share of
    the top-k's mass. Ids from `num_tokens` on pad the vocabulary: they count in log-probs and are never drawn. Raises
    FloatingPointError for logits that define no distribution (NaN, +inf, all -inf).
    """
    scaled = logits.float() if temperature in (0, 1) else logits.float() / temperature
    probs = choices = torch.softmax(scaled, dim=-1)
    if num_tokens is not None and num_tokens < probs.shape[-1]:
        choices = probs[:, :num_tokens] / probs[:, :num_tokens].sum(dim=-1, keepdim=True)
    width = choices.shape[-1]
    if temperature == 0:
        tokens = choices.argmax(dim=-1, keepdim=True)
    elif top_p == 1 and (top_k == 0 or top_k >= width):
        tokens = _inverse_cdf(choices, uniforms)
    else:
        weights, candidates = _filter(choices, top_p, min(top_k or width, width))
        tokens = candidates.gather(1, _inverse_cdf(weights, uniforms))
    drawn = probs.gather(1, tokens).squeeze(1)
    if not bool((drawn > 0).all()):
        rows = (~(drawn > 0)).nonzero().flatten().tolist()
        raise FloatingPointError(f"logits of rows {rows[:8]} define no distribution: NaN, +inf or all -inf")
    return tokens.squeeze(1), drawn.log()


def _filter(probs: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Candidates by falling probability: (probabilities with the removed ones at 0, token ids), both [B, K]."""
    num_tokens = probs.shape[-1]
    if top_k < num_tokens:
        weights, candidates = probs.topk(top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
    elif num_tokens <= _LIKELIEST:
        weights, candidates = probs.sort(dim=-1, descending=True, stable=True)
    else:
        weights, candidates = probs.topk(_LIKELIEST, dim=-1)
        # Sorted row by row, so that a row's order among equals does not depend on the other rows.
        flat_rows = (weights.sum(dim=-1) < top_p).nonzero().flatten()
        if len(flat_rows):
            weights, candidates = (pad(found, (0, num_tokens - _LIKELIEST)) for found in (weights, candidates))
            weights[flat_rows], candidates[flat_rows] = probs[flat_rows].sort(dim=-1, descending=True, stable=True)
    if top_p < 1:
        shares = _fixed_point(weights)
        # A candidate stays while the mass before it falls short of top_p, so the first one always does.
        weights = weights.masked_fill((shares.cumsum(dim=-1) - shares).double() >= top_p * 2.0**62, 0.0)
    return weights, candidates


def _fixed_point(weights: Tensor) -> Tensor:
    """Probabilities as int64 multiples of 2**-62. Their sums are exact, so a parallel scan (GPU) never falls and is
    deterministic; torch refuses to scan floats there under `compute.deterministic`."""
    return (weights.double() * 2.0**62).long()


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Per row the first index [B, 1] whose cumulative weight exceeds uniform * total; never one of weight 0."""
    num_rows, width = weights.shape
    if width <= _BLOCK:
        return _draw(weights, uniforms)[0]
    blocks = pad(weights, (0, -width % _BLOCK)) if width % _BLOCK else weights
    blocks = blocks.reshape(num_rows, -1, _BLOCK)
    block, within = _draw(blocks.sum(dim=-1), uniforms)
    drawn = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1)
    return (block * _BLOCK + _draw(drawn, within)[0]).clamp_(max=width - 1)


def _draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The index [B, 1] that `_inverse_cdf` finds, and where in its share the target lies [B], in [0, 1)."""
    shares = _fixed_point(weights / weights.sum(dim=-1, keepdim=True))
    cdf = shares.cumsum(dim=-1)
    total = cdf[:, -1:]
    # Below the total even when the uniform is 1 or rounds to 1, so the index found has positive weight.
    target = torch.minimum((uniforms.double().unsqueeze(1) * total.double()).long(), total - 1)
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=weights.shape[-1] - 1)
    share = shares.gather(1, index)
    return index, ((target - cdf.gather(1, index) + share).double() / share.double()).squeeze(1)
