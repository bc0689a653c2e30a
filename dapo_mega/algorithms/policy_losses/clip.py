"""PPO's clipped ratio with separate lower and upper bounds, and dual clipping (DAPO eq. 8 and 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

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

if TYPE_CHECKING:
    from torch import Tensor


class ClipLoss(PolicyLoss):
    """`r A` within two bounds, with `r` the new / old probability of a token (PPO, DAPO)."""

    kind: Literal["clip"] = "clip"
    low: float = Field(default=0.2, gt=0, le=1)
    """The loss stops pushing a token's probability down below (1 - low) times its old value; 1: no lower bound."""
    high: float = Field(default=0.28, gt=0)
    """The loss stops pushing a token's probability up above (1 + high) times its old value. Raise it if entropy falls
    too fast, lower it if training is unstable."""
    dual_clip: float | None = Field(default=10.0, gt=1)
    """Bounds the loss of a token with negative advantage A at -dual_clip x A. null: no bound."""

    described_metrics: ClassVar[tuple[Metric, ...]] = (
        RATIO_MEAN,
        CLIP_LOW_SHARE,
        CLIP_HIGH_SHARE,
        Metric(
            "policy/dual_clip_share",
            "share",
            "Share of tokens with negative advantage whose loss the dual clip bounds; 0 without "
            "`algorithm.policy_loss.dual_clip`.",
            "0 or nearly: the ratio of such a token exceeds 10 by default",
            "above 0 in many steps",
            "lower `optimizer.learning_rate`; look at the mismatch",
        ),
        Metric(
            "policy/up_clipped_probability",
            "probability",
            "Mean probability of the tokens that the upper bound clips; missing where it clips none.",
            "below 0.2 (DAPO, figure 3a): the upper bound holds back unlikely tokens",
            "near 1: likely tokens are held back",
            "read `policy/kl_to_old`; lower `optimizer.learning_rate`",
        ),
    )

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        return self._of(tokens, tokens.logprobs, tokens.old_logprobs)

    def _of(self, tokens: LossInputs, logprobs: Tensor, old_logprobs: Tensor) -> TokenLosses:
        """-min(r A, clip(r, 1 - low, 1 + high) A) of these log-probs [T], which may be those of whole responses (DAPO
        eq. 8 and 10). `dual_clip` c bounds the loss of negative advantages by -c A (public DAPO code, c = 10)."""
        advantages, in_loss = tokens.advantages, tokens.in_loss
        if not (logprobs.shape == old_logprobs.shape == advantages.shape and logprobs.ndim == 1):
            raise ValueError(
                f"expected three tensors of one shape [T], got {tuple(logprobs.shape)}, {tuple(old_logprobs.shape)}, "
                f"{tuple(advantages.shape)}"
            )
        ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        unclipped = -ratio * advantages
        clipped = -ratio.clamp(1 - self.low, 1 + self.high) * advantages
        loss = unclipped.maximum(clipped)
        active = clipped > unclipped
        clipped_dual = active.new_zeros(active.shape)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            clipped_dual = (advantages < 0) & (loss > bound)
            loss = bound.where(clipped_dual, loss)
        up_clipped = active & (advantages > 0) & in_loss
        sums = {
            RATIO_MEAN.name: (ratio.detach() * in_loss).sum(),
            CLIP_LOW_SHARE.name: (active & (advantages < 0) & in_loss).sum(),
            CLIP_HIGH_SHARE.name: up_clipped.sum(),
            "policy/dual_clip_share": (clipped_dual & in_loss).sum(),
            "policy/up_clipped_probability": (tokens.logprobs.detach().exp() * up_clipped).sum(),
        }
        return TokenLosses(loss, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        metrics = super().metrics(sums)
        metrics.pop("policy/up_clipped_probability", None)
        return {
            **metrics,
            **means_over(
                sums[CLIP_HIGH_SHARE.name], {"policy/up_clipped_probability": sums["policy/up_clipped_probability"]}
            ),
        }


class GspoLoss(ClipLoss):
    """clip with the geometric mean of a whole response's ratio in place of `r` (GSPO).

    -min(s A, clip(s, 1 - low, 1 + high) A) per token (arXiv 2507.18071, eq. 5-7), where s is the geometric mean over
    the response of pi_theta / pi_old. As in GSPO-token (eq. 13), each token has the value of s and the gradient
    s grad log pi_theta of its own; over a response of n tokens their mean has the loss and the gradient of eq. 5.
    """

    kind: Literal["gspo"] = "gspo"  # type: ignore[assignment]

    is_sequence_level: ClassVar[bool] = True

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        means = tokens.response_log_ratios() / tokens.response_lengths()
        log_ratios = means + tokens.logprobs - tokens.logprobs.detach()
        return self._of(tokens, log_ratios, log_ratios.new_zeros(log_ratios.shape))
