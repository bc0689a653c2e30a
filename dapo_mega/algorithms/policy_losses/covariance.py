"""Clip-Cov and KL-Cov: hold back the few tokens that cost the most entropy (arXiv 2505.22617, section 4.2).

These tokens have a high covariance of log-prob and advantage, (log p - mean) (A - mean) over the tokens of an update.
`megatron/covariance.py` chooses them before the update, so that the choice does not depend on how the update is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from dapo_mega.algorithms.policy_losses.base import RATIO_MEAN, LossInputs, PolicyLoss, TokenLosses
from dapo_mega.algorithms.policy_losses.clip import ClipLoss
from dapo_mega.declared import Metric

if TYPE_CHECKING:
    from torch import Tensor

_NO_COVARIANCE = 1e-12

COVARIANCE_SHARE = Metric(
    "policy/covariance_share",
    "share",
    "Share of tokens that `algorithm.policy_loss.kind=clip_cov` or `kl_cov` holds back.",
    "near `algorithm.policy_loss.share`, or above where an update has few tokens",
    "0 with clip_cov: no token is within `algorithm.policy_loss.bounds`",
    "lower the bounds",
)


class ClipCovLoss(ClipLoss):
    """clip, without any gradient of some tokens of high covariance (arXiv 2505.22617, eq. 11)."""

    kind: Literal["clip_cov"] = "clip_cov"  # type: ignore[assignment]
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of an update's tokens that are held back, at least one token. Published: 0.0002."""
    bounds: tuple[float, float] = (1.0, 5.0)
    """[low, high]: the tokens are drawn from those whose covariance of log-prob and advantage is within."""

    described_metrics: ClassVar[tuple[Metric, ...]] = (*ClipLoss.described_metrics, COVARIANCE_SHARE)
    chooses_tokens: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check(self) -> ClipCovLoss:
        if self.bounds[0] >= self.bounds[1]:
            raise ValueError(
                f"algorithm.policy_loss.bounds={list(self.bounds)} must be [low, high] with low < high, such as [1, 5]"
            )
        return self

    def ranks(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens are chosen by, from the highest down, and which can be, of covariances [N]: equal ranks are
        drawn from."""
        low, high = self.bounds
        return covariance.new_zeros(covariance.shape), (covariance >= low) & (covariance <= high)

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        losses = super().token_losses(tokens)
        chosen = tokens.chosen_tokens()
        sums = {**losses.sums, COVARIANCE_SHARE.name: (chosen & tokens.in_loss).sum()}
        return TokenLosses(losses.loss.detach().where(chosen, losses.loss), sums)


class KlCovLoss(PolicyLoss):
    """`r A` without bounds, and `kl` |log r| more for the tokens of highest covariance (arXiv 2505.22617, eq. 12)."""

    kind: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of an update's tokens that are held back, at least one token. Published: 0.002 for 7B (the preset's),
    0.0002 for 32B."""
    kl: float = Field(default=1.0, ge=0)
    """Weight of |log r| in the loss of the tokens that are held back."""

    described_metrics: ClassVar[tuple[Metric, ...]] = (RATIO_MEAN, COVARIANCE_SHARE)
    chooses_tokens: ClassVar[bool] = True

    def ranks(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """See `ClipCovLoss.ranks`. In one mini-batch tokens have covariances of about 1; the noise of equal log-probs
        or advantages is no rank."""
        return covariance, covariance.abs() > _NO_COVARIANCE

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        log_ratios, chosen = tokens.log_ratios(), tokens.chosen_tokens()
        ratios = log_ratios.exp()
        loss = -ratios * tokens.advantages + self.kl * chosen * log_ratios.abs()
        sums = {
            RATIO_MEAN.name: (ratios.detach() * tokens.in_loss).sum(),
            COVARIANCE_SHARE.name: (chosen & tokens.in_loss).sum(),
        }
        return TokenLosses(loss, sums)
