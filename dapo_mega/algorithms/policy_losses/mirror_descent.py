"""Online policy mirror descent: the squared surrogate of Kimi k1.5 (arXiv 2501.12599, eq. 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping

from dapo_mega.algorithms.policy_losses.protocol import LossInputs, TokenLosses
from dapo_mega.algorithms.ratios import means_over
from dapo_mega.config import LossSettings


class MirrorDescentLoss:
    """(A - tau S)^2 / (2 tau) - A^2 / (2 tau) = -A S + tau S^2 / 2 per response, spread over its tokens.

    S is the sum over the response of log(pi_theta / pi_old) and tau `mirror_temperature`; pi_old are the weights that
    the step starts from. The gradient, (tau S - A) grad log pi_theta(response), is eq. 3 of the paper. Take the sum
    over tokens as aggregation: a mean over tokens would weigh short responses more.
    """

    sum_names = ("squared_log_ratios", "responses")
    is_sequence_level = True

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        tau, log_ratios = settings.mirror_temperature, tokens.logprobs - tokens.old_logprobs
        total = tokens.response_log_ratios()
        # The first term has the value, with half of the square's gradient; the second, without a value, the other half.
        loss = (0.5 * tau * total - tokens.advantages) * log_ratios + 0.5 * tau * total * (
            log_ratios - log_ratios.detach()
        )
        share = tokens.in_loss / tokens.response_lengths()
        return TokenLosses(loss, {"squared_log_ratios": (total.square() * share).sum(), "responses": share.sum()})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        return means_over(sums["responses"], {"policy/squared_log_ratio": sums["squared_log_ratios"]})
