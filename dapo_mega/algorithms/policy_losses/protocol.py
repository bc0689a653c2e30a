"""The interface of policy losses: inputs, outputs and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dapo_mega.config import LossSettings


@dataclass(frozen=True)
class LossInputs:
    """Response tokens of one micro-batch, each field [T]: log-probs in nats under the current weights (with gradient)
    and under the weights that the step started from, advantages, and which tokens count in the loss."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    in_loss: Tensor


@dataclass(frozen=True)
class TokenLosses:
    """`loss` [T] carries the gradient; `sums` are detached scalars over the tokens in the loss, under the loss's
    `sum_names`."""

    loss: Tensor
    sums: Mapping[str, Tensor]


class PolicyLoss(Protocol):
    """One kind of loss: per-token losses, and metrics from the sums that it declares.

    The objective adds weighting and averaging over tokens, importance weights, KL and entropy terms for all kinds.
    """

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums that `token_losses` returns."""

    def token_losses(self, tokens: LossInputs, settings: LossSettings) -> TokenLosses:
        """The loss of every token. Raises ValueError for inputs of different shapes."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a mini-batch from the sums over all its tokens and from `loss_tokens`, their number."""
