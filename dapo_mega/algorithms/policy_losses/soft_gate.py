"""SAPO: a smooth gate in place of clipping (arXiv 2511.20347)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from dapo_mega.algorithms.policy_losses.base import RATIO_MEAN, LossInputs, PolicyLoss, TokenLosses
from dapo_mega.declared import Metric


class SapoLoss(PolicyLoss):
    """A smooth gate around `r` = 1 in place of bounds (SAPO).

    -(4 / tau) sigmoid(tau (r - 1)) A per token, with r = pi_theta / pi_old of the token and tau `gate[0]` for A > 0,
    `gate[1]` otherwise. On policy (r = 1) the gradient is that of REINFORCE; the further r is from 1, the smaller it
    gets.
    """

    kind: Literal["sapo"] = "sapo"
    gate: tuple[float, float] = (1.0, 1.05)
    """Steepness of the gate for tokens with A > 0, and for others. Higher attenuates tokens whose probability has
    changed more."""

    described_metrics: ClassVar[tuple[Metric, ...]] = (
        RATIO_MEAN,
        Metric(
            "policy/gate_mean",
            "share",
            "Mean share of a token's gradient that the soft gate of `algorithm.policy_loss.kind=sapo` lets pass.",
            "near 1; exactly 1 with one update per step",
            "falls in later steps",
            "lower `optimizer.learning_rate`",
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> SapoLoss:
        if min(self.gate) <= 0:
            raise ValueError(f"algorithm.policy_loss.gate={list(self.gate)} must be two positive numbers")
        return self

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        ratio = tokens.ratios()
        positive, negative = self.gate
        is_positive = tokens.advantages > 0
        tau = is_positive * positive + ~is_positive * negative
        opened = (tau * (ratio - 1)).sigmoid()
        gate = opened.detach()
        sums = {
            "policy/gate_mean": (4 * gate * (1 - gate) * tokens.in_loss).sum(),
            RATIO_MEAN.name: (ratio.detach() * tokens.in_loss).sum(),
        }
        return TokenLosses(-(4 / tau) * opened * tokens.advantages, sums)
