"""SAPO: a smooth gate in place of clipping (arXiv 2511.20347)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dapo_mega.algorithms.policy_losses.protocol import LossInputs, TokenLosses
from dapo_mega.algorithms.ratios import means_over
from dapo_mega.config import LossSettings


class SoftGateLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A per token, with r = pi_theta / pi_old of the token.

    tau is `soft_gate[0]` for A > 0 and `soft_gate[1]` otherwise. On policy (r = 1) the gradient is that of REINFORCE;
    the further r is from 1, the smaller it gets.
    """

    sum_names = ("gate", "ratio")
    is_sequence_level = False

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """See `PolicyLoss`."""
        ratio = tokens.ratios()
        positive, negative = settings.soft_gate
        tau = torch.where(tokens.advantages > 0, positive, negative)
        opened = torch.sigmoid(tau * (ratio - 1))
        with torch.no_grad():
            sums = {
                "gate": (4 * opened * (1 - opened) * tokens.in_loss).sum(),
                "ratio": (ratio * tokens.in_loss).sum(),
            }
        return TokenLosses(-(4 / tau) * opened * tokens.advantages, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        return means_over(sums["loss_tokens"], {"policy/gate_mean": sums["gate"], "policy/ratio_mean": sums["ratio"]})
