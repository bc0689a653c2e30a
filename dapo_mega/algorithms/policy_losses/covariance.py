"""Clip-Cov and KL-Cov: hold back the few tokens that cost the most entropy (arXiv 2505.22617, section 4.2).

These tokens have a high covariance of log-prob and advantage, (log p - mean) (A - mean) over the tokens of an update.
`megatron/covariance.py` chooses them before the update, so that the choice does not depend on how the update is split.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dapo_mega.algorithms.policy_losses.clip import ClippedLoss
from dapo_mega.algorithms.policy_losses.protocol import LossInputs, TokenLosses
from dapo_mega.algorithms.ratios import means_over
from dapo_mega.config import LossSettings


class ClipCovLoss:
    """PPO's clipped loss, without any gradient of the chosen tokens (eq. 11)."""

    sum_names = (*ClippedLoss.sum_names, "chosen")
    is_sequence_level = False

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        losses = ClippedLoss().token_losses(tokens, settings)
        chosen = tokens.chosen_tokens()
        sums = {**losses.sums, "chosen": (chosen & tokens.in_loss).sum()}
        return TokenLosses(torch.where(chosen, losses.loss.detach(), losses.loss), sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        share = {"policy/covariance_share": sums["chosen"]}
        return {**ClippedLoss().metrics(sums), **means_over(sums["loss_tokens"], share)}


class KlCovLoss:
    """-r A without clipping, and `covariance_kl` |log r| more for the chosen tokens (eq. 12); r = pi_theta / pi_old."""

    sum_names = ("ratio", "chosen")
    is_sequence_level = False

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        log_ratios, chosen = tokens.log_ratios(), tokens.chosen_tokens()
        ratios = log_ratios.exp()
        loss = -ratios * tokens.advantages + settings.covariance_kl * chosen * log_ratios.abs()
        sums = {"ratio": (ratios.detach() * tokens.in_loss).sum(), "chosen": (chosen & tokens.in_loss).sum()}
        return TokenLosses(loss, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        totals = {"policy/ratio_mean": sums["ratio"], "policy/covariance_share": sums["chosen"]}
        return means_over(sums["loss_tokens"], totals)
