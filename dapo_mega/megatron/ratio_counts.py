"""Counts importance ratios in fixed bins, so that the counts of all micro-batches and processes add up to the same
histogram in every layout."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BINS = 100
HIGHEST = 2.0
"""Bins of equal width from 0 to here; what is larger counts in the last one."""


class RatioCounts:
    """Counts on the device of what is added, without waiting for it."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    @torch.no_grad()
    def add(self, log_ratios: Tensor, counted: Tensor | None = None) -> None:
        """Count exp(log_ratios) [N] where `counted` [N] is true; everywhere without it. NaN counts in the last bin."""
        scaled = torch.nan_to_num(log_ratios.detach().float(), nan=torch.inf).exp() * (NUM_BINS / HIGHEST)
        bins = scaled.clamp(0, NUM_BINS - 1).long()
        ones = torch.ones_like(bins) if counted is None else counted.long()
        if self._counts is None:
            self._counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=bins.device)
        self._counts.index_add_(0, bins, ones)

    def counts(self) -> Tensor:
        """[NUM_BINS] int64 on the CPU."""
        return torch.zeros(NUM_BINS, dtype=torch.int64) if self._counts is None else self._counts.cpu()
