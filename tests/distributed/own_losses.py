"""Policy losses of one's own."""

import torch


def tapered(tokens):
    """It looks at whole responses."""
    weights = torch.sigmoid(tokens.response_log_ratios() / tokens.response_lengths())
    return -weights * tokens.advantages * tokens.logprobs


class Shifted:
    """It is an object, and looks at all that a loss can be given."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, tokens):
        shift = (tokens.logprobs - tokens.reference_logprobs).square() - 0.1 * tokens.entropy
        by_engine = (tokens.old_logprobs - tokens.engine_logprobs).clamp(-1, 1).exp()
        return by_engine * -tokens.ratios() * tokens.advantages + self.weight * shift
