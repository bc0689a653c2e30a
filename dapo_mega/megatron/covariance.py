"""Chooses the tokens of an update whose log-prob and advantage vary together most (arXiv 2505.22617, eq. 10).

The choice is made once, from the log-probs of the step's start, over all tokens of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms.policy_losses import ClipCovLoss, KlCovLoss
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.objectives import TokenBatch


def choose_tokens(
    batches: Sequence[TokenBatch], loss: ClipCovLoss | KlCovLoss, processes: Processes, seed: int
) -> list[TokenBatch]:
    """The micro-batches of one update with `chosen` set. Collective.

    Both choose `share` of the tokens in the loss, at least one: KL-Cov those with the highest covariance,
    Clip-Cov a draw from those within `bounds`. `seed` and a token's place decide the draw, and between equal
    covariances. Where no token has a covariance, as with equal advantages, nothing costs entropy and none is chosen.
    """
    tokens = [_tokens(batch) for batch in batches] if processes.is_last_stage else []
    counted = torch.empty(2, 0, dtype=torch.float64)
    if processes.counts_outputs:
        counted = torch.cat([counted, *(values[:, in_loss] for values, in_loss in tokens)], dim=1)
    sums = torch.stack([torch.tensor(float(counted.shape[1]), dtype=torch.float64), *counted.sum(1)])
    dist.all_reduce(sums, group=processes.control)
    means = sums[1:, None] / max(float(sums[0]), 1.0)
    ranks = [_ranks(batch, *columns, means, loss, seed) for batch, columns in zip(batches, tokens, strict=False)]
    own = torch.cat([torch.empty(2, 0, dtype=torch.float64), *(ranks if processes.counts_outputs else [])], dim=1)
    last = _last_chosen(own, max(1, int(loss.share * float(sums[0]))), processes)
    chosen = [
        replace(batch, chosen=_at_least_as_high(rank, last).to(processes.device))
        for batch, rank in zip(batches, ranks, strict=False)
    ]
    return chosen or list(batches)


def _tokens(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """(log-probs and advantages [2, N] float64, in the loss [N]) of the response tokens."""
    assert batch.old_logprobs is not None, "tokens are chosen by their log-probs at the start of the step"
    values = torch.stack([batch.old_logprobs.double().cpu(), batch.micro_batch.advantages.double().cpu()])
    return values, batch.micro_batch.in_loss.cpu()


def _ranks(
    batch: TokenBatch, values: Tensor, in_loss: Tensor, means: Tensor, loss: ClipCovLoss | KlCovLoss, seed: int
) -> Tensor:
    """Two numbers for every response token [2, N]: tokens are chosen from the highest first one downwards, and of equal
    ones from the highest second one; -inf if the token cannot be."""
    covariance = (values - means).prod(0)
    first, eligible = loss.ranks(covariance)
    first = torch.where(in_loss & eligible, first, -torch.inf)
    return torch.stack([first, torch.from_numpy(_uniform(batch, seed))])


def _last_chosen(own: Tensor, number: int, processes: Processes) -> Tensor:
    """The `number`-th highest rank [2] over all processes, or the lowest if there are fewer."""
    mine = torch.full((2, number), -torch.inf, dtype=torch.float64)
    candidates = _sorted(own)[:, :number]
    mine[:, : candidates.shape[1]] = candidates
    found = [torch.empty_like(mine) for _ in range(processes.world_size)]
    dist.all_gather(found, mine, group=processes.control)
    highest = _sorted(torch.cat(found, dim=1))[:, :number]
    return highest[:, -1] if highest.shape[1] else torch.full((2,), torch.inf, dtype=torch.float64)


def _sorted(ranks: Tensor) -> Tensor:
    """Those that can be chosen, from the highest down."""
    ranks = ranks[:, ranks[0] > -torch.inf]
    return ranks[:, np.lexsort((-ranks[1].numpy(), -ranks[0].numpy())).copy()]


def _at_least_as_high(ranks: Tensor, last: Tensor) -> Tensor:
    return (ranks[0] > last[0]) | ((ranks[0] == last[0]) & (ranks[1] >= last[1]))


def _uniform(batch: TokenBatch, seed: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for every response token [N], from the seed, its sample and its position alone."""
    samples, positions = (column.numpy().astype(np.uint64) for column in batch.micro_batch.places())
    places = (samples << np.uint64(32)) + positions
    state = places ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # The finalizer of SplitMix64.
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray((state ^ (state >> np.uint64(31))) / 2.0**64)
