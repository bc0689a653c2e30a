"""Functions of two log-probabilities per token: importance weights, KL estimates, sums over responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # The configuration is read without torch.
    from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]

# exp() of a larger difference overflows float32; such ratios are clipped anyway.
MAX_LOG_RATIO = 20.0
# What rounding leaves of 1 - a sum of float32 probabilities that is 1 is less.
REST_FLOOR = 1e-6


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_rollout, cap) per token [T], detached."""
    difference = (old_logprobs - rollout_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp().clamp(max=cap)


def sequence_importance_weights(sums: Tensor, cap: float) -> Tensor:
    """min(product of pi_old / pi_rollout, cap) of every segment [n], from `segment_sums` of the log-ratios."""
    return sums[0].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)


def segment_sums(log_ratios: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of `log_ratios` [T] and number of tokens of every segment, [2, n] float64, detached."""
    values = log_ratios.detach().double()
    sums = values.new_zeros(2, num_segments)
    sums[0].index_add_(0, segment_ids, values)
    sums[1].index_add_(0, segment_ids, values.new_ones(len(values)))
    return sums


def within_bounds(sums: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Which segments' geometric mean ratio exp(sum / tokens) lies in [low, high], [n] bool, from `segment_sums`.

    Segments without tokens count as inside. This masks whole responses on a mismatch between trainer and engine:
    per-token caps do not catch a response with a small mismatch in every token.
    """
    low, high = bounds
    means = (sums[0] / sums[1].clamp(min=1)).exp()
    return (means >= low) & (means <= high)


def effective_share(weight: float, squared_weight: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2) of n weights, from their sums: the share of samples that equal weights would need."""
    return weight**2 / (count * squared_weight)


def kl_with_rest(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(pi_theta || pi_ref) per position [N], in nats, over k tokens, with log-probs [N, k], and all others as one: a
    lower bound of that over all tokens, equal to it where there are no others. These have at least REST_FLOOR."""
    rest, reference_rest = ((1 - x.exp().sum(-1)).clamp(min=REST_FLOOR).log() for x in (logprobs, reference_logprobs))
    of_tokens = (logprobs.exp() * (logprobs - reference_logprobs)).sum(-1)
    return of_tokens + rest.exp() * (rest - reference_rest)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KlKind) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) per token [T], in nats, from tokens sampled by the policy.

    With d = log pi_ref - log pi_theta: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (GRPO's choice). k3 takes d as at
    most 20: beyond, it has no gradient instead of one that overflows.
    """
    d = reference_logprobs - logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    d = d.clamp(max=MAX_LOG_RATIO)  # In both terms: of the second alone the gradient would push the other way.
    return d.expm1() - d


def mean_over(total: float, count: float) -> float:
    """`total` / `count`, or 0 if `count` is 0."""
    return total / count if count else 0.0


def means_over(count: float, totals: Mapping[str, float]) -> dict[str, float]:
    """`totals` / `count` by name; none if `count` is 0, as a 0 would dilute means of these means."""
    return {name: total / count for name, total in totals.items()} if count else {}
