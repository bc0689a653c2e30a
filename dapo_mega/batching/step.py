"""From the groups of a step to this process's mini-batches of packed micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dapo_mega.algorithms import group_advantages
from dapo_mega.algorithms.aggregation import AggregationKind
from dapo_mega.batching.handover import HandoverGroups, broadcast_headers, broadcast_names, distribute_samples
from dapo_mega.batching.packing import (
    MicroBatch,
    Plan,
    SampleColumns,
    build_micro_batch,
    padded_lengths,
    plan_micro_batches,
    sample_costs,
)
from dapo_mega.config import RunConfig
from dapo_mega.types import Group, Prompt, Response, Sample


def samples_of_groups(
    groups: Sequence[Group], config: RunConfig, version: int, engines: Sequence[str] = ()
) -> list[Sample]:
    """One sample per response, groups in order, advantages within each group.

    Overlong filtering keeps truncated responses out of the loss, while their rewards stay in the group's
    statistics. `version` is that of the weights the step starts from, `engines` are URLs in the order of their numbers.
    """
    samples = []
    for group in groups:
        rewards = [scored.reward for scored in group.responses]
        advantages = group_advantages(rewards, config.algorithm.advantage)
        for scored, advantage in zip(group.responses, advantages, strict=True):
            truncated = scored.response.finish_reason == "length"
            sample = unweighted_sample(group.prompt, scored.response, version, engines)
            in_loss = not (truncated and config.reward.overlong_filtering)
            samples.append(replace(sample, advantage=float(advantage), in_loss=in_loss))
    return samples


def unweighted_sample(prompt: Prompt, response: Response, version: int, engines: Sequence[str]) -> Sample:
    """A response to be scored, outside of the loss; for `version` and `engines` see `samples_of_groups`."""
    url, start = last_engine(response)
    return Sample(
        token_ids=np.concatenate([prompt.token_ids, response.token_ids]),
        prompt_length=len(prompt.token_ids),
        advantage=0.0,
        in_loss=False,
        rollout_logprobs=response.logprobs,
        num_stale_tokens=off_policy_tokens(response, version),
        engine=engines.index(url) if url in engines else -1,
        engine_start=start,
    )


def last_engine(response: Response) -> tuple[str, int]:
    """The URL of the engine that sampled the end of the response, and from which token on; ("", 0) if not known."""
    if not response.engine_spans:
        return "", 0
    return response.engine_spans[-1][0], response.engine_spans[-2][1] if len(response.engine_spans) > 1 else 0


def engines_of(responses: Iterable[Response]) -> tuple[str, ...]:
    """URLs of the engines that sampled the responses' ends."""
    return tuple(sorted({url for response in responses if (url := last_engine(response)[0])}))


def off_policy_tokens(response: Response, version: int) -> int:
    """Number of tokens, from the start, that weights older than `version` sampled."""
    spans = response.version_spans or ((response.weight_version, len(response.token_ids)),)
    return max((end for sampled_by, end in spans if sampled_by < version), default=0)


@dataclass(frozen=True)
class StepPlan:
    """`mini_batches[i]` plans the i-th optimizer update: sample indices, counted from the start of the step.

    The measures are of the whole step: sums over its mini-batches over sums, so that a mini-batch counts as much as
    it takes. Micro-batches run side by side on the ranks, and ranks wait for each other at every update.
    """

    mini_batches: tuple[Plan, ...]
    packing_efficiency: float
    """Real tokens over number of micro-batches of all ranks x tokens of the mini-batch's longest micro-batch. There is
    no padding between samples: what is lost is that shorter micro-batches wait for the longest."""
    budget_fill: float
    """Real tokens over number of micro-batches of all ranks x token budget."""
    rank_imbalance: float
    """Estimated cost of each mini-batch's dearest rank over the ranks' mean cost, less 1."""

    def samples_of(self, data_rank: int) -> npt.NDArray[np.int64]:
        """The samples of one rank, in the order in which its micro-batches hold them."""
        own = [i for plan in self.mini_batches for indices in plan[data_rank] for i in indices]
        return np.array(own, dtype=np.int64)


@dataclass(frozen=True)
class StepBatch:
    """`mini_batches[i]` are this rank's micro-batches of the i-th optimizer update of one pass over the step.

    The measures are those of `StepPlan`, the same on every rank.
    """

    mini_batches: tuple[tuple[MicroBatch, ...], ...]
    packing_efficiency: float
    budget_fill: float
    rank_imbalance: float
    has_fresh: bool = True
    """Whether any token of the whole step was sampled with the weights that the step starts from."""
    engines: tuple[str, ...] = ()
    """URLs by the numbers that `MicroBatch.engine_ids` has."""


@dataclass(frozen=True)
class PackingLayout:
    """What the model's layout asks of micro-batches.

    `data_size` replicas; lengths that are multiples of `multiple_of`, samples padded to multiples of
    `segment_multiple`, counts that are multiples of `count_multiple`; a sample of L tokens costs
    L * (1 + attention_cost * L).
    """

    data_size: int
    multiple_of: int = 1
    attention_cost: float = 0.0
    count_multiple: int = 1
    segment_multiple: int = 1


def build_for_layout(
    columns: SampleColumns,
    indices: Sequence[int],
    layout: PackingLayout,
    aggregation: AggregationKind,
    max_response_tokens: int,
) -> MicroBatch:
    """The samples `indices` as one micro-batch with the lengths that the layout asks for."""
    return build_micro_batch(
        columns,
        indices,
        aggregation=aggregation,
        max_response_tokens=max_response_tokens,
        multiple_of=layout.multiple_of,
        segment_multiple=layout.segment_multiple,
    )


def plan_step(lengths: npt.NDArray[np.int64], config: RunConfig, layout: PackingLayout) -> StepPlan:
    """Cut the step's samples, of `lengths` [S] tokens, into mini-batches of whole groups and plan each one.

    Raises ValueError when they do not make whole mini-batches or a sample is over the token budget.
    """
    per_update = config.batch.mini_batch_groups * config.batch.group_size
    if len(lengths) % per_update:
        raise ValueError(f"{len(lengths)} samples do not make whole mini-batches of {per_update}")
    budget = config.batch.tokens_per_microbatch
    sizes = padded_lengths(lengths, layout.segment_multiple)
    costs = sample_costs(sizes, layout.attention_cost)
    plans = []
    longest_tokens = budget_tokens = 0
    dearest = 0.0
    for start in range(0, len(lengths), per_update):
        plan = plan_micro_batches(
            lengths[start : start + per_update],
            layout.data_size,
            budget,
            layout.attention_cost,
            count_multiple=layout.count_multiple,
            segment_multiple=layout.segment_multiple,
        )
        plan = [[[start + i for i in indices] for indices in rank] for rank in plan]
        count = layout.data_size * len(plan[0])
        longest_tokens += count * max(int(sizes[indices].sum()) for rank in plan for indices in rank)
        budget_tokens += count * budget
        dearest += max(sum(float(costs[indices].sum()) for indices in rank) for rank in plan)
        plans.append(plan)
    num_tokens = int(lengths.sum())
    return StepPlan(
        tuple(plans),
        packing_efficiency=num_tokens / longest_tokens,
        budget_fill=num_tokens / budget_tokens,
        rank_imbalance=dearest * layout.data_size / float(costs.sum()) - 1,
    )


def pack_step(
    columns: SampleColumns,
    config: RunConfig,
    *,
    data_rank: int,
    data_size: int,
    multiple_of: int,
    attention_cost: float,
    count_multiple: int = 1,
    segment_multiple: int = 1,
) -> StepBatch:
    """Cut the step into mini-batches of whole groups and pack each one for this data-parallel rank."""
    layout = PackingLayout(data_size, multiple_of, attention_cost, count_multiple, segment_multiple)
    plan = plan_step(columns.lengths, config, layout)
    return _pack(columns, [mini_batch[data_rank] for mini_batch in plan.mini_batches], plan, config, layout)


def hand_over_step(
    columns: SampleColumns | None,
    config: RunConfig,
    layout: PackingLayout,
    *,
    data_rank: int,
    groups: HandoverGroups,
    engines: Sequence[str] = (),
) -> StepBatch:
    """The step that rank 0 gives as columns, with the engines that their numbers mean (the others pass None and none),
    packed for each process's replica.

    Every process learns the lengths, computes the same plan, and receives its own replica's samples only. The result
    is what `pack_step` makes of the whole columns. Raises ValueError like `plan_step`, on every process alike.
    """
    headers = broadcast_headers(columns, groups.control)
    plan = plan_step(headers.lengths, config, layout)
    samples = [plan.samples_of(rank) for rank in range(layout.data_size)]
    own = distribute_samples(columns, headers, samples, data_rank=data_rank, groups=groups)
    # Own samples arrive in the order in which the micro-batches hold them.
    numbers = iter(range(len(own)))
    renumbered = [[[next(numbers) for _ in indices] for indices in plan_[data_rank]] for plan_ in plan.mini_batches]
    has_fresh = bool((headers.off_policy_tokens < headers.lengths - headers.prompt_lengths).any())
    batch = _pack(own, renumbered, plan, config, layout)
    return replace(batch, has_fresh=has_fresh, engines=broadcast_names(engines, groups.control))


def _pack(
    columns: SampleColumns,
    mini_batches: Sequence[Sequence[Sequence[int]]],
    plan: StepPlan,
    config: RunConfig,
    layout: PackingLayout,
) -> StepBatch:
    """One rank's mini-batches, given as indices into `columns`, with the measures of `plan`."""
    aggregation, longest = config.algorithm.aggregation, config.rollout.max_response_tokens
    packed = tuple(
        tuple(build_for_layout(columns, indices, layout, aggregation, longest) for indices in mini_batch)
        for mini_batch in mini_batches
    )
    return StepBatch(packed, plan.packing_efficiency, plan.budget_fill, plan.rank_imbalance)
