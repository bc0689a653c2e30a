"""Turns samples on rank 0 into every rank's mini-batches of packed micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dapo_mega.algorithms.aggregation import AggregationKind
from dapo_mega.batching.microbatch import MicroBatch, pack
from dapo_mega.batching.plan import PackingLayout, PackingStats, StepPlan, plan_step
from dapo_mega.batching.samples import FlatSamples
from dapo_mega.batching.scatter import ScatterGroups, scatter


@dataclass(frozen=True)
class StepBatch:
    """`mini_batches[i]` are this rank's micro-batches of the i-th optimizer update of one pass over the step."""

    mini_batches: tuple[tuple[MicroBatch, ...], ...]
    stats: PackingStats
    """The whole step's statistics, the same on every rank."""
    engines: tuple[str, ...] = ()
    """The engines' URLs by their numbers in `MicroBatch.targets.engine_ids`."""


@dataclass(frozen=True)
class PlannedSamples:
    """A step's samples, and which process packs which of them into what micro-batch."""

    samples: FlatSamples
    plan: StepPlan


def plan_samples(
    samples: FlatSamples,
    layout: PackingLayout,
    *,
    token_budget: int,
    groups_per_update: int | None = None,
    whole_trajectories: bool = False,
) -> PlannedSamples:
    """Plan a step; all samples form one mini-batch unless `groups_per_update` is given.

    With `whole_trajectories` the samples of a trajectory share a micro-batch, as what is summed over whole trajectories
    needs. Raises `plan_step`'s InputError.
    """
    plan = plan_step(
        samples.lengths.numpy(),
        layout,
        token_budget=token_budget,
        groups=samples.origins.groups.numpy(),
        groups_per_update=groups_per_update,
        together=samples.origins.trajectories.numpy() if whole_trajectories else None,
    )
    return PlannedSamples(samples, plan)


def pack_step(
    planned: PlannedSamples | None,
    layout: PackingLayout,
    groups: ScatterGroups,
    *,
    aggregation: AggregationKind,
    max_response_tokens: int,
) -> StepBatch:
    """Scatter and pack rank 0's samples. Collective; the other ranks pass None."""
    samples, plan = (planned.samples, planned.plan) if planned else (None, None)
    own, stats, engines = scatter(samples, plan, groups)
    settings: dict[str, Any] = {"aggregation": aggregation, "max_response_tokens": max_response_tokens}
    return StepBatch(tuple(tuple(pack(part, layout, **settings) for part in mini) for mini in own), stats, engines)
