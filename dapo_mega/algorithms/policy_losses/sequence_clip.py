"""GSPO: the ratio of a whole response, clipped (arXiv 2507.18071)."""

from __future__ import annotations

import torch

from dapo_mega.algorithms.policy_losses.clip import ClippedLoss, clip_with_sums
from dapo_mega.algorithms.policy_losses.protocol import LossInputs, TokenLosses
from dapo_mega.config import LossSettings


class SequenceClippedLoss(ClippedLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) per token (eq. 5-7).

    s is the geometric mean over the response of pi_theta / pi_old. As in GSPO-token (eq. 13), each token has the value
    of s and the gradient s grad log pi_theta of its own; over a response of n tokens their mean has the loss and the
    gradient of eq. 5.
    """

    is_sequence_level = True

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        means = tokens.response_log_ratios() / tokens.response_lengths()
        log_ratios = means + tokens.logprobs - tokens.logprobs.detach()
        return clip_with_sums(tokens, log_ratios, torch.zeros_like(log_ratios), settings)
