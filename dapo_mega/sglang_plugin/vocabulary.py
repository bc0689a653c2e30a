"""Rows that pad a model's embedding are no token of its tokenizer, and engines do not draw them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from dapo_mega.engines.sglang.weight_protocol import NUM_TOKENS


def draw_without_padding(draw: Callable[..., Any], sampler: Any, probs: Tensor, *arguments: Any, **named: Any) -> Any:
    """Sample from the probabilities [rows, vocabulary] of tokens alone; in log-probs the others count as before."""
    padding = probs[:, _num_tokens() :]
    kept = padding.clone()
    padding.zero_()
    try:
        return draw(sampler, probs, *arguments, **named)
    finally:
        padding.copy_(kept)


def choose_without_padding(
    choose: Callable[..., Any], sampler: Any, output: Any, info: Any, *more: Any, **named: Any
) -> Any:
    """Greedy answers take the likeliest token, whose log-prob counts the others as before."""
    if not info.is_all_greedy:
        return choose(sampler, output, info, *more, **named)
    logits = output.next_token_logits
    everything = logits.float().logsumexp(-1)
    logits[:, _num_tokens() :] = float("-inf")
    share = logits.float().logsumexp(-1) - everything
    chosen = choose(sampler, output, info, *more, **named)
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs + share
    return chosen


def _num_tokens() -> int:
    """All, where this engine was not started by `dapo-mega serve` or its model has no tokenizer."""
    return int(os.environ.get(NUM_TOKENS, 2**31))
