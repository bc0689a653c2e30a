"""Chooses the tokens of an update whose log-prob and advantage vary together most (arXiv 2505.22617, eq. 10).

The choice is made once, from the log-probs of the step's start, over all tokens of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.config import LossSettings
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.objectives import TokenBatch


def choose_tokens(
    batches: Sequence[TokenBatch], settings: LossSettings, processes: Processes, seed: int
) -> list[TokenBatch]:
    """The micro-batches of one update with `chosen` set. Collective.

    KL-Cov chooses the `covariance_share` of the tokens in the loss with the highest covariance, at least one. Clip-Cov
    draws as many, on average, from those within `covariance_bounds`; `seed` and a token's place decide the draw.
    """
    tokens = [_tokens(batch) for batch in batches] if processes.is_last_stage else []
    counted = torch.empty(2, 0, dtype=torch.float64)
    if processes.counts_outputs:
        counted = torch.cat([counted, *(values[:, in_loss] for values, in_loss in tokens)], dim=1)
    sums = torch.stack([torch.tensor(float(counted.shape[1]), dtype=torch.float64), *counted.sum(1)])
    dist.all_reduce(sums, group=processes.control)
    number = int(sums[0])
    means = sums[1:, None] / max(number, 1)
    own = (counted - means).prod(0)
    wanted = settings.covariance_share * number
    if settings.kind == "kl_cov":
        low, high, probability = _highest(own, max(1, int(wanted)), processes), float("inf"), 1.0
    else:
        low, high = settings.covariance_bounds
        within = ((own >= low) & (own <= high)).sum().double()
        dist.all_reduce(within, group=processes.control)
        probability = min(1.0, wanted / float(within)) if within else 0.0
    chosen = []
    for batch, (values, in_loss) in zip(batches, tokens, strict=False):
        covariance = (values - means).prod(0)
        drawn = torch.from_numpy(_uniform(batch, seed) < probability)
        mask = in_loss & drawn & (covariance >= low) & (covariance <= high)
        chosen.append(replace(batch, chosen=mask.to(processes.device)))
    return chosen or list(batches)


def _tokens(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """(log-probs and advantages [2, N] float64, in the loss [N]) of the response tokens."""
    assert batch.old_logprobs is not None, "tokens are chosen by their log-probs at the start of the step"
    targets = batch.micro_batch.targets
    mask = targets.response_mask
    values = torch.stack([batch.old_logprobs.double().cpu(), targets.advantages[mask].double().cpu()])
    return values, targets.loss_mask[mask].cpu()


def _highest(own: Tensor, number: int, processes: Processes) -> float:
    """The `number`-th highest value over all processes."""
    found: list[Any] = [None] * processes.world_size
    dist.all_gather_object(found, own.topk(min(number, len(own))).values, group=processes.control)
    values = torch.cat(found)
    return float(values.topk(min(number, len(values))).values[-1]) if len(values) else 0.0


def _uniform(batch: TokenBatch, seed: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for every response token [N], from the seed, its sample and its position alone."""
    micro = batch.micro_batch
    mask = micro.targets.response_mask
    places = (micro.targets.sample_ids[mask].cpu().numpy().astype(np.uint64) << np.uint64(32)) + micro.positions[
        mask
    ].cpu().numpy().astype(np.uint64)
    state = places ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # The finalizer of SplitMix64.
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray((state ^ (state >> np.uint64(31))) / 2.0**64)
