"""Losses whose gradient is a fixed weight times the score function: -w A grad log pi_theta."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dapo_mega.algorithms.policy_losses.base import (
    CLIP_HIGH_SHARE,
    CLIP_LOW_SHARE,
    RATIO_MEAN,
    LossInputs,
    PolicyLoss,
    TokenLosses,
)
from dapo_mega.algorithms.ratios import MAX_LOG_RATIO
from dapo_mega.declared import Metric


class ReinforceLoss(PolicyLoss):
    """`A log p` without any ratio (Williams 1992); ReMax and RLOO use it with their baselines.

    It is exact for a single update per step only: later updates train on responses of an older policy as if they were
    their own.
    """

    kind: Literal["reinforce"] = "reinforce"

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        return TokenLosses(-tokens.advantages * tokens.logprobs, {})


class CispoLoss(PolicyLoss):
    """`A log p` times the bounded, detached `r` of the token (CISPO of MiniMax-M1, arXiv 2506.13585).

    -sg(clip(r, 1 - low, 1 + high)) A log pi_theta per token, where r is pi_theta / pi_old and sg stops the gradient, so
    that a clipped token still has one. `low` 1 is no lower bound, as in the paper.
    """

    kind: Literal["cispo"] = "cispo"
    low: float = Field(default=0.2, gt=0, le=1)
    """r counts as no less than 1 - low; 1: no lower bound."""
    high: float = Field(default=0.28, gt=0)
    """r counts as no more than 1 + high."""

    described_metrics: ClassVar[tuple[Metric, ...]] = (RATIO_MEAN, CLIP_LOW_SHARE, CLIP_HIGH_SHARE)

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        ratio = tokens.ratios().detach()
        weights = ratio.clamp(1 - self.low, 1 + self.high)
        sums = {
            CLIP_LOW_SHARE.name: ((ratio < weights) & tokens.in_loss).sum(),
            CLIP_HIGH_SHARE.name: ((ratio > weights) & tokens.in_loss).sum(),
            RATIO_MEAN.name: (ratio * tokens.in_loss).sum(),
        }
        return TokenLosses(-weights * tokens.advantages * tokens.logprobs, sums)


class ToprLoss(PolicyLoss):
    """`A log p`, for A < 0 times min(s, 1) with `s` of the whole response (tapered off-policy REINFORCE, arXiv
    2503.14286, eq. 8).

    Responses with A >= 0 have weight 1, as in supervised training. For the others s, detached, is the product of
    pi_theta / pi_old over the response: what the policy has unlearnt already is pushed no further.
    """

    kind: Literal["topr"] = "topr"

    described_metrics: ClassVar[tuple[Metric, ...]] = (CLIP_LOW_SHARE,)
    is_sequence_level: ClassVar[bool] = True

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        # Smaller weights would only make denormal gradients, which are slow.
        tapered = tokens.response_log_ratios().clamp(-MAX_LOG_RATIO, 0.0).exp()
        weights = tapered.masked_fill(~(tokens.advantages < 0), 1.0)
        sums = {CLIP_LOW_SHARE.name: ((weights < 1) & tokens.in_loss).sum()}
        return TokenLosses(-weights * tokens.advantages * tokens.logprobs, sums)
