"""What every loss of the policy takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dapo_mega.config import LossSettings


@dataclass(frozen=True)
class LossInputs:
    """Response tokens of one micro-batch, each field [T]: log-probabilities in nats under the weights that are updated
    (with gradient) and under those that the step started from, advantages, and which tokens count in the loss."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    in_loss: Tensor


@dataclass(frozen=True)
class TokenLosses:
    """`loss` [T] carries the gradient; `sums` are scalars over the tokens in the loss, detached, by the names that the
    loss declares."""

    loss: Tensor
    sums: Mapping[str, Tensor]


class PolicyLoss(Protocol):
    """One kind of loss: per-token losses, and metrics from the sums that it declares.

    Weighting and averaging over tokens, importance weights, KL and entropy terms are added for every kind alike.
    """

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of what `token_losses` sums."""

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """The loss of every token. Raises ValueError for inputs of different shapes."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a mini-batch from the sums over all its tokens, and `loss_tokens`, the number of these."""
