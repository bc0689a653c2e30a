"""Per-token policy loss: decoupled clipping, dual clipping, importance weights, KL estimators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]

# exp() of a larger difference overflows float32; ratios this far out are clipped anyway.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLossTerms:
    """What the clipped objective yields for each token, all [T].

    `loss` carries the gradient. `clipped_low` / `clipped_high` mark tokens whose gradient the lower / upper
    bound removed; `clipped_dual` those bounded by the dual clip; `ratio` is pi_theta / pi_old, detached.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    rollout_logprobs: Tensor | None = None,
    importance_cap: float | None = None,
) -> PolicyLossTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token (DAPO eq. 8 and 10); all inputs [T].

    `dual_clip` c bounds the loss of negative advantages by -c A (public DAPO code, c = 10). With
    `importance_cap` every token's loss is weighted by min(pi_old / pi_rollout, cap), without gradient
    (truncated importance sampling against a mismatch between trainer and engine).
    """
    if not (logprobs.shape == old_logprobs.shape == advantages.shape and logprobs.ndim == 1):
        raise ValueError(
            f"expected three tensors of one shape [T], got {tuple(logprobs.shape)}, {tuple(old_logprobs.shape)}, "
            f"{tuple(advantages.shape)}"
        )
    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
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
    if importance_cap is not None:
        if rollout_logprobs is None:
            raise ValueError("importance_cap needs rollout_logprobs")
        loss = loss * importance_weights(old_logprobs, rollout_logprobs, importance_cap)
    return PolicyLossTerms(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=active & (advantages < 0),
        clipped_high=active & (advantages > 0),
        clipped_dual=clipped_dual,
    )


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_rollout, cap) per token [T], detached."""
    difference = (old_logprobs - rollout_logprobs).detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return difference.exp().clamp(max=cap)


def segment_sums(log_ratios: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of `log_ratios` [T] and number of tokens of every segment, [2, n] float64, detached."""
    values = torch.stack([log_ratios.detach().double(), torch.ones_like(log_ratios, dtype=torch.float64)])
    return values.new_zeros(2, num_segments).index_add_(1, segment_ids, values)


def within_bounds(sums: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Which segments' geometric mean ratio exp(sum / tokens) lies in [low, high], [n] bool, from `segment_sums`.

    Segments without tokens do. Sequence-level masking against a mismatch between trainer and engine: per-token caps
    let pass a response that is off by a little in every token.
    """
    low, high = bounds
    means = (sums[0] / sums[1].clamp(min=1)).exp()
    return (means >= low) & (means <= high)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KlKind) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) per token [T], in nats, from tokens sampled by the policy.

    With d = log pi_ref - log pi_theta: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (GRPO's choice).
    """
    d = reference_logprobs - logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    return d.clamp(max=_MAX_LOG_RATIO).exp() - d - 1
