"""Losses whose gradient is a fixed weight times the score function: -w A grad log pi_theta."""

from __future__ import annotations

from collections.abc import Mapping
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
from dapo_mega.algorithms.ratios import MAX_LOG_RATIO, means_over
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
    low: float = Field(default=0.2, gt=0, le=1, description="r counts as no less than 1 - low; 1: no lower bound.")
    high: float = Field(default=0.28, gt=0, description="r counts as no more than 1 + high.")

    sum_names: ClassVar[tuple[str, ...]] = ("clipped_low", "clipped_high", "ratio")
    described_metrics: ClassVar[tuple[Metric, ...]] = (RATIO_MEAN, CLIP_LOW_SHARE, CLIP_HIGH_SHARE)

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        ratio = tokens.ratios().detach()
        weights = ratio.clamp(1 - self.low, 1 + self.high)
        sums = {
            "clipped_low": ((ratio < weights) & tokens.in_loss).sum(),
            "clipped_high": ((ratio > weights) & tokens.in_loss).sum(),
            "ratio": (ratio * tokens.in_loss).sum(),
        }
        return TokenLosses(-weights * tokens.advantages * tokens.logprobs, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        totals = {
            "policy/clip_low_share": sums["clipped_low"],
            "policy/clip_high_share": sums["clipped_high"],
            "policy/ratio_mean": sums["ratio"],
        }
        return means_over(sums["loss_tokens"], totals)


class ToprLoss(PolicyLoss):
    """`A log p`, for A < 0 times min(s, 1) with `s` of the whole response (tapered off-policy REINFORCE, arXiv
    2503.14286, eq. 8).

    Responses with A >= 0 have weight 1, as in supervised training. For the others s, detached, is the product of
    pi_theta / pi_old over the response: what the policy has unlearnt already is pushed no further.
    """

    kind: Literal["topr"] = "topr"

    sum_names: ClassVar[tuple[str, ...]] = ("tapered",)
    described_metrics: ClassVar[tuple[Metric, ...]] = (CLIP_LOW_SHARE,)

    @property
    def is_sequence_level(self) -> bool:
        return True

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        # Smaller weights would only make denormal gradients, which are slow.
        tapered = tokens.response_log_ratios().clamp(-MAX_LOG_RATIO, 0.0).exp()
        weights = tapered.masked_fill(~(tokens.advantages < 0), 1.0)
        sums = {"tapered": ((weights < 1) & tokens.in_loss).sum()}
        return TokenLosses(-weights * tokens.advantages * tokens.logprobs, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return means_over(sums["loss_tokens"], {"policy/clip_low_share": sums["tapered"]})
