"""PPO's clipped ratio with separate lower and upper bounds, and dual clipping (DAPO eq. 8 and 10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_mega.algorithms.policy_losses.protocol import LossInputs, TokenLosses
from dapo_mega.algorithms.ratios import MAX_LOG_RATIO, means_over
from dapo_mega.config import LossSettings


@dataclass(frozen=True)
class ClippedTokens:
    """The result of clipping for each token, all [T].

    `loss` carries the gradient. `clipped_low` / `clipped_high` mark tokens whose gradient the lower / upper bound
    removed, `clipped_dual` tokens bounded by the dual clip; `ratio` is pi_theta / pi_old, detached.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedTokens:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token (DAPO eq. 8 and 10); all inputs [T].

    `dual_clip` c bounds the loss of negative advantages by -c A (public DAPO code, c = 10).
    """
    if not (logprobs.shape == old_logprobs.shape == advantages.shape and logprobs.ndim == 1):
        raise ValueError(
            f"expected three tensors of one shape [T], got {tuple(logprobs.shape)}, {tuple(old_logprobs.shape)}, "
            f"{tuple(advantages.shape)}"
        )
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    active = clipped > unclipped
    clipped_dual = torch.zeros_like(active)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        clipped_dual = (advantages < 0) & (loss > bound)
        loss = torch.where(clipped_dual, bound, loss)
    return ClippedTokens(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=active & (advantages < 0),
        clipped_high=active & (advantages > 0),
        clipped_dual=clipped_dual,
    )


class ClippedLoss:
    """`clipped_loss` with the shares of clipped tokens as metrics."""

    sum_names = ("clipped_low", "clipped_high", "clipped_dual", "ratio", "up_clipped_probability")
    is_sequence_level = False

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        return clip_with_sums(tokens, tokens.logprobs, tokens.old_logprobs, settings)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        tokens = sums["loss_tokens"]
        shares = {
            "policy/clip_low_share": sums["clipped_low"],
            "policy/clip_high_share": sums["clipped_high"],
            "policy/dual_clip_share": sums["clipped_dual"],
            "policy/ratio_mean": sums["ratio"],
        }
        up_clipped = {"policy/up_clipped_probability": sums["up_clipped_probability"]}
        return {**means_over(tokens, shares), **means_over(sums["clipped_high"], up_clipped)}


def clip_with_sums(tokens: LossInputs, logprobs: Tensor, old_logprobs: Tensor, settings: LossSettings) -> TokenLosses:
    """`clipped_loss` of these log-probs [T], which may be those of whole responses, with `ClippedLoss`'s sums."""
    terms = clipped_loss(
        logprobs,
        old_logprobs,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    with torch.no_grad():
        up_clipped = terms.clipped_high & tokens.in_loss
        sums = {
            "clipped_low": (terms.clipped_low & tokens.in_loss).sum(),
            "clipped_high": up_clipped.sum(),
            "clipped_dual": (terms.clipped_dual & tokens.in_loss).sum(),
            "ratio": (terms.ratio * tokens.in_loss).sum(),
            "up_clipped_probability": (tokens.logprobs.exp() * up_clipped).sum(),
        }
    return TokenLosses(terms.loss, sums)
