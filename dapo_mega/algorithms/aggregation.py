"""How per-token losses become one number: weights and denominators that do not depend on the batch split.

A mini-batch's loss is sum_i w_i * sum_t l_it / sum_i d_i over its responses i. Both sums run over all
micro-batches and data-parallel ranks; Megatron adds them up, so this module sees one response at a time.
"""

from __future__ import annotations

from typing import Literal

AggregationKind = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_constant"]


def response_weight(length: int, kind: AggregationKind, max_response_tokens: int) -> tuple[float, int]:
    """Weight w of each token's loss and denominator d of one response with `length` tokens in the loss.

    - `token_mean`: every token of the mini-batch weighs the same (DAPO eq. 8): w = 1, d = length.
    - `sequence_mean_token_mean`: mean over tokens, then over responses (GRPO): w = 1 / length, d = 1.
    - `sequence_mean_token_sum`: sum over tokens, then mean over responses: w = 1, d = 1.
    - `sequence_mean_constant`: sum over tokens over a constant, then mean over responses (Dr. GRPO): w = 1,
      d = max_response_tokens.

    A response without tokens in the loss (masked by overlong filtering) counts nowhere: (0, 0).
    """
    if length == 0:
        return 0.0, 0
    if kind == "token_mean":
        return 1.0, length
    if kind == "sequence_mean_token_mean":
        return 1.0 / length, 1
    return 1.0, 1 if kind == "sequence_mean_token_sum" else max_response_tokens
