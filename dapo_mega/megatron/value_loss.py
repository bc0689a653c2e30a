"""The loss of one micro-batch of a value model, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dapo_mega.algorithms.ratios import means_over
from dapo_mega.algorithms.value_loss import explained_variance, value_loss
from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.megatron.objectives import LossTerm


@dataclass(frozen=True)
class ValueBatch:
    """A micro-batch and, per response token [N] float32 and on the last stage only, the values at the step's start and
    the returns."""

    micro_batch: MicroBatch
    old_values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True)
class ValueLoss:
    """`value_loss` as the mean over the tokens in the loss, whatever the policy's aggregation."""

    clip: float | None = None
    sum_names: ClassVar[tuple[str, ...]] = (
        "loss", "denominator", "clipped", "value", "return", "return_squares", "error", "error_squares"
    )  # fmt: skip

    def evaluate(self, values: Tensor, batch: ValueBatch) -> LossTerm:
        """The micro-batch's part of the loss of `values` [N]; its sums are in float64."""
        assert batch.old_values is not None
        assert batch.returns is not None
        in_loss = batch.micro_batch.in_loss.to(values.device)
        # Taken out before anything is computed, since 0 times what is no number would be none either.
        values, old_values, returns = (
            of_tokens.to(values.device)[in_loss] for of_tokens in (values, batch.old_values, batch.returns)
        )
        losses = value_loss(values, old_values, returns, self.clip)
        total = losses.loss.sum()
        with torch.no_grad():
            counted = returns.double()
            error = counted - old_values.double()
            sums = {
                "loss": total.detach().double(),
                "denominator": in_loss.sum().double(),
                "clipped": losses.clipped.sum().double(),
                "value": values.double().sum(),
                "return": counted.sum(),
                "return_squares": counted.square().sum(),
                "error": error.sum(),
                "error_squares": error.square().sum(),
            }
        return LossTerm(total, in_loss.sum().int(), sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a mini-batch, from the sums over all its micro-batches and ranks; none without tokens."""
        count = sums["denominator"]
        if not count:
            return {}
        totals = {
            "critic/value_loss": sums["loss"],
            "critic/clip_share": sums["clipped"],
            "critic/value_mean": sums["value"],
            "critic/return_mean": sums["return"],
        }
        explained = explained_variance(
            count, sums["return"], sums["return_squares"], sums["error"], sums["error_squares"]
        )
        return {**means_over(count, totals), "critic/explained_variance": explained}
