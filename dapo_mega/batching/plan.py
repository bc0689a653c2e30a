"""Plans a step: assigns samples to ranks and micro-batches. Only rank 0 plans."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dapo_mega.batching.balancing import best_fit_count, partition, partition_equal_count, rebalance
from dapo_mega.errors import InputError

Lengths = npt.NDArray[np.int64]
"""The number of tokens of each sample [S]."""

Numbers = npt.NDArray[np.int64]

Plan = list[list[list[int]]]
"""One mini-batch: `plan[rank][micro_batch]` lists the indices of its samples, ascending."""

# Tolerances, relative to the mean: tokens of a micro-batch, cost of a rank.
_MICRO_BATCH_TOKENS, _RANK_COST = 0.02, 0.012


@dataclass(frozen=True)
class PackingLayout:
    """The parallel layout's constraints on micro-batches.

    There are `data_size` replicas. Micro-batch lengths are multiples of `multiple_of`. Samples are padded to multiples
    of `segment_multiple`, which divides `multiple_of`. Micro-batch counts are multiples of `count_multiple`. A sample
    of L tokens costs L * (1 + attention_cost * L).
    """

    data_size: int = 1
    multiple_of: int = 1
    attention_cost: float = 0.0
    count_multiple: int = 1
    segment_multiple: int = 1


@dataclass(frozen=True)
class PackingStats:
    """How well a step's micro-batches are filled: ratios of totals over its mini-batches.

    Ranks run micro-batches in parallel, and wait for each other at every update.
    """

    packing_efficiency: float
    """Real tokens / (micro-batches of all ranks x tokens of the mini-batch's longest micro-batch). The loss is waiting
    for the longest micro-batch; there is no padding between samples."""
    budget_fill: float
    """Real tokens / (micro-batches of all ranks x token budget)."""
    rank_imbalance: float
    """Estimated cost of each mini-batch's most loaded rank / the ranks' mean cost, minus 1."""


@dataclass(frozen=True)
class StepPlan:
    """`mini_batches[i]` plans the i-th optimizer update: sample indices, counted from the start of the step."""

    mini_batches: tuple[Plan, ...]
    stats: PackingStats

    def samples_of(self, rank: int) -> list[int]:
        """The samples of one rank, in the order of its micro-batches."""
        return [i for plan in self.mini_batches for indices in plan[rank] for i in indices]


def plan_step(
    lengths: Lengths,
    layout: PackingLayout,
    *,
    token_budget: int,
    groups: Numbers | None = None,
    groups_per_update: int | None = None,
    together: Numbers | None = None,
) -> StepPlan:
    """Cut the step's samples, of `lengths` [S] tokens, into mini-batches and plan each one.

    `groups` [S] numbers the samples' groups from 0, ascending. Every `groups_per_update` of them form one mini-batch;
    all samples do if that is not given. Consecutive samples of equal number in `together` [S] share a micro-batch.
    Raises InputError if the groups do not fill whole mini-batches, or samples that stay together exceed the budget.
    """
    sizes = padded_lengths(lengths, layout.segment_multiple)
    costs = sample_costs(sizes, layout.attention_cost)
    plans = []
    longest_tokens = budget_tokens = 0
    max_cost = 0.0
    for start, stop in pairwise(_bounds(len(lengths), groups, groups_per_update)):
        kept = None if together is None else together[start:stop]
        plan = plan_micro_batches(lengths[start:stop], layout, token_budget, kept)
        plan = [[[start + i for i in indices] for indices in rank] for rank in plan]
        count = layout.data_size * len(plan[0])
        longest_tokens += count * max(int(sizes[indices].sum()) for rank in plan for indices in rank)
        budget_tokens += count * token_budget
        max_cost += max(sum(float(costs[indices].sum()) for indices in rank) for rank in plan)
        plans.append(plan)
    num_tokens = int(lengths.sum())
    stats = PackingStats(
        packing_efficiency=num_tokens / longest_tokens,
        budget_fill=num_tokens / budget_tokens,
        rank_imbalance=max_cost * layout.data_size / float(costs.sum()) - 1,
    )
    return StepPlan(tuple(plans), stats)


def _bounds(num_samples: int, groups: Numbers | None, groups_per_update: int | None) -> list[int]:
    """Where mini-batches begin, and the end."""
    if groups is None or groups_per_update is None:
        return [0, num_samples]
    number = int(groups[-1]) + 1
    if number % groups_per_update:
        raise InputError(f"{number} groups do not fill whole mini-batches of {groups_per_update}")
    return np.searchsorted(groups, range(0, number + 1, groups_per_update)).tolist()


def padded_lengths(lengths: Lengths, segment_multiple: int) -> Lengths:
    """`lengths` rounded up to multiples of `segment_multiple`, in tokens."""
    return -(-lengths // segment_multiple) * segment_multiple


def sample_costs(lengths: Lengths, attention_cost: float) -> npt.NDArray[np.float64]:
    """Estimated cost of each sample, L * (1 + attention_cost * L), in units of one token without attention."""
    return lengths * (1.0 + attention_cost * lengths)


def plan_micro_batches(
    lengths: Lengths, layout: PackingLayout, token_budget: int, together: Numbers | None = None
) -> Plan:
    """Assign samples to ranks and micro-batches: `plan[rank][micro_batch]` lists sample indices, ascending.

    Every rank gets the same number of micro-batches, a multiple of `count_multiple`, each of at most `token_budget`
    tokens. Sample lengths and the budget are rounded up to `segment_multiple`. Micro-batches may be empty if there are
    fewer samples than micro-batches. Raises InputError for a sample over the budget.

    1. Samples go into as few micro-batches as best fit needs, the longest sample first, each into the emptiest.
    2. Each rank gets the same number of micro-batches, so that the ranks' costs are even.
    3. A local search exchanges samples of micro-batches that are too long and of ranks that cost too much.

    If a micro-batch still exceeds the budget, the count rises by `count_multiple` and the plan is made again.

    A rank's cheapest micro-batches come first and last and the most expensive in the middle, each next to similar ones:
    pipeline stages work on neighbours at the same time, and stages idle while the first and last micro-batches fill and
    drain the pipeline.
    """
    starts = np.arange(len(lengths))
    if together is not None:
        starts = np.flatnonzero(np.diff(together, prepend=together[0] - 1))
    counts = np.diff(starts, append=len(lengths))
    tokens = np.add.reduceat(lengths, starts)
    if tokens.max() > token_budget:
        several = f"a trajectory of {counts[tokens.argmax()]} samples, which this method needs together, with"
        what = "a sample of" if counts[tokens.argmax()] == 1 else several
        raise InputError(f"{what} {tokens.max()} tokens does not fit the budget of {token_budget} per micro-batch")
    sizes = padded_lengths(lengths, layout.segment_multiple)
    costs = np.add.reduceat(sample_costs(sizes, layout.attention_cost), starts)
    sizes = np.add.reduceat(sizes, starts)
    # Samples that stay together may need more padding than the budget has.
    budget = max(-(-token_budget // layout.segment_multiple) * layout.segment_multiple, int(sizes.max()))
    num_ranks = layout.data_size
    loads = np.stack([sizes, costs], axis=1).astype(np.float64)
    max_cost = float(costs.sum()) / num_ranks * (1 + _RANK_COST)
    per_step = num_ranks * layout.count_multiple
    count = -(-best_fit_count(sizes, budget) // per_step) * layout.count_multiple
    while True:
        mean_tokens = float(sizes.sum()) / (num_ranks * count)
        max_tokens = min(max(mean_tokens * (1 + _MICRO_BATCH_TOKENS), float(sizes.max())), budget)
        bins = partition(sizes, num_ranks * count)
        ranks = partition_equal_count(np.array([costs[indices].sum() for indices in bins]), num_ranks)
        dealt = [bins[b] for rank in ranks for b in rank]
        dealt = rebalance(dealt, loads, np.array([max_tokens, max_cost]), bins_per_rank=count)
        if max(int(sizes[indices].sum()) for indices in dealt) <= budget:
            break
        count += layout.count_multiple
    plan = [dealt[first : first + count] for first in range(0, len(dealt), count)]
    plan = [_cheap_ends([sorted(units) for units in rank], costs) for rank in plan]
    return [[[int(starts[unit]) + i for unit in units for i in range(counts[unit])] for units in rank] for rank in plan]


def _cheap_ends(micro_batches: list[list[int]], costs: npt.NDArray[np.float64]) -> list[list[int]]:
    """Ascending cost up to the middle, descending after it."""
    ascending = sorted(micro_batches, key=lambda indices: (float(costs[indices].sum()), indices))
    return ascending[0::2] + ascending[1::2][::-1]
