"""Online policy mirror descent: the squared surrogate of Kimi k1.5 (arXiv 2501.12599, eq. 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from dapo_mega.algorithms.policy_losses.base import LossInputs, PolicyLoss, TokenLosses
from dapo_mega.algorithms.ratios import means_over
from dapo_mega.declared import Metric


class MirrorDescentLoss(PolicyLoss):
    """`A log s - temperature / 2 (log s)^2`, with `s` the new / old probability of a whole response (Kimi k1.5).

    (A - tau S)^2 / (2 tau) - A^2 / (2 tau) = -A S + tau S^2 / 2 per response, spread over its tokens, where S is the
    sum over the response of log(pi_theta / pi_old) and pi_old the weights that the step starts from. The gradient,
    (tau S - A) grad log pi_theta(response), is eq. 3 of the paper. Take the sum over tokens as aggregation: a mean over
    tokens would weigh short responses more.
    """

    kind: Literal["mirror_descent"] = "mirror_descent"
    temperature: float = Field(default=0.1, gt=0)
    """tau: how strongly a response's probability is held at its old value."""

    is_sequence_level: ClassVar[bool] = True
    sum_names: ClassVar[tuple[str, ...]] = ("squared_log_ratios", "responses")
    described_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "policy/squared_log_ratio",
            "nats^2",
            "Mean over responses of the square of log(policy's probability / that at the step's start), which "
            "`algorithm.policy_loss.kind=mirror_descent` keeps small.",
            "small; exactly 0 with one update per step",
            "grows from step to step",
            "raise `algorithm.policy_loss.temperature`",
        ),
    )

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        tau, log_ratios = self.temperature, tokens.logprobs - tokens.old_logprobs
        total = tokens.response_log_ratios()
        # The first term has the value, with half of the square's gradient; the second, without a value, the other half.
        loss = (0.5 * tau * total - tokens.advantages) * log_ratios + 0.5 * tau * total * (
            log_ratios - log_ratios.detach()
        )
        share = tokens.in_loss / tokens.response_lengths()
        return TokenLosses(loss, {"squared_log_ratios": (total.square() * share).sum(), "responses": share.sum()})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return means_over(sums["responses"], {"policy/squared_log_ratio": sums["squared_log_ratios"]})
