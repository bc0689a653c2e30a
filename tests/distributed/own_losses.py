"""Policy losses of one's own."""

import torch


def tapered(tokens):
    """It looks at whole responses."""
    weights = torch.sigmoid(tokens.response_log_ratios() / tokens.response_lengths())
    return -weights * tokens.advantages * tokens.logprobs
