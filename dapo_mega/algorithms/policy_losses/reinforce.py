"""Losses whose gradient is a fixed weight times the score function: -w A grad log pi_theta."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dapo_mega.algorithms.policy_losses.protocol import LossInputs, TokenLosses
from dapo_mega.algorithms.ratios import MAX_LOG_RATIO, means_over
from dapo_mega.config import LossSettings


class ReinforceLoss:
    """-A log pi_theta per token (Williams 1992), without any ratio; ReMax and RLOO use it with their baselines.

    It is exact for a single update per step only: later updates train on responses of an older policy as if they were
    their own.
    """

    sum_names: tuple[str, ...] = ()
    is_sequence_level = False

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        return TokenLosses(-tokens.advantages * tokens.logprobs, {})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        return {}


class ClippedImportanceLoss:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta per token (MiniMax-M1, arXiv 2506.13585).

    r is pi_theta / pi_old of the token and sg stops the gradient, so that a clipped token still has one. `clip_low` 1
    is no lower bound, as in the paper.
    """

    sum_names = ("clipped_low", "clipped_high", "ratio")
    is_sequence_level = False

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        ratio = tokens.ratios().detach()
        weights = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        sums = {
            "clipped_low": ((ratio < weights) & tokens.in_loss).sum(),
            "clipped_high": ((ratio > weights) & tokens.in_loss).sum(),
            "ratio": (ratio * tokens.in_loss).sum(),
        }
        return TokenLosses(-weights * tokens.advantages * tokens.logprobs, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        totals = {
            "policy/clip_low_share": sums["clipped_low"],
            "policy/clip_high_share": sums["clipped_high"],
            "policy/ratio_mean": sums["ratio"],
        }
        return means_over(sums["loss_tokens"], totals)


class TaperedLoss:
    """TOPR: -w A log pi_theta per token (tapered off-policy REINFORCE, arXiv 2503.14286, eq. 8).

    Responses with A >= 0 have w = 1, as in supervised training. The others have w = min(s, 1), detached, with s the
    product of pi_theta / pi_old over the response: what the policy has unlearnt already is pushed no further.
    """

    sum_names = ("tapered",)
    is_sequence_level = True

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        # Smaller weights would only make denormal gradients, which are slow.
        tapered = tokens.response_log_ratios().clamp(-MAX_LOG_RATIO, 0.0).exp()
        weights = torch.where(tokens.advantages < 0, tapered, 1.0)
        sums = {"tapered": ((weights < 1) & tokens.in_loss).sum()}
        return TokenLosses(-weights * tokens.advantages * tokens.logprobs, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        return means_over(sums["loss_tokens"], {"policy/clip_low_share": sums["tapered"]})
