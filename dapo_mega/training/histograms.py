"""The histograms of a step that all ranks count together: advantages, and importance ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.objectives import TokenBatch
from dapo_mega.megatron.ratio_counts import HIGHEST, RatioCounts
from dapo_mega.metrics import Histogram
from dapo_mega.metrics.histogram import NUM_BINS, bin_range


class StepCounts:
    """What this rank counts during a step: ratios of the policy to that at the step's start, over all updates, and of
    the trainer's probabilities to the engines'."""

    def __init__(self) -> None:
        self.ratios = RatioCounts()
        self.importance_weights = RatioCounts()

    def histograms(self, mini_batches: Sequence[Sequence[TokenBatch]], processes: Processes) -> dict[str, Histogram]:
        """The histograms over all ranks, the same on each and in every layout. Collective."""
        micros = [batch.micro_batch for mini_batch in mini_batches for batch in mini_batch]
        advantages = torch.empty(0, dtype=torch.float64)  # Of the tokens in the loss that this rank counts.
        if processes.counts_outputs and micros:
            values = torch.cat([micro.advantages[micro.in_loss] for micro in micros]).double().cpu()
            advantages = values[values.isfinite()]
        ends = torch.full((2,), -math.inf, dtype=torch.float64)
        if len(advantages):
            ends = torch.stack([-advantages.min(), advantages.max()])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=processes.control)
        lowest, highest = (-ends[0]).item(), ends[1].item()
        low, high = bin_range(lowest, highest) if highest >= lowest else (0.0, 1.0)
        bins = ((advantages - low) / (high - low) * NUM_BINS).clamp(0, NUM_BINS - 1).long()
        own = [torch.bincount(bins, minlength=NUM_BINS), self.ratios.counts(), self.importance_weights.counts()]
        counts = torch.cat(own)
        if not processes.counts_outputs:
            counts.zero_()
        dist.all_reduce(counts, group=processes.control)
        of_advantages, of_ratios, of_weights = (tuple(part.tolist()) for part in counts.split([len(c) for c in own]))
        found = {
            "policy/advantage": Histogram(low, high, of_advantages),
            "policy/ratio": Histogram(0.0, HIGHEST, of_ratios),
            "mismatch/importance_weight": Histogram(0.0, HIGHEST, of_weights),
        }
        return {name: histogram for name, histogram in found.items() if histogram.total}
