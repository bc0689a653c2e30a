"""From the groups of a step to this process's mini-batches of packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dapo_mega.algorithms import group_advantages
from dapo_mega.config import RunConfig
from dapo_mega.packing import MicroBatch, SampleColumns, build_micro_batch, plan_micro_batches
from dapo_mega.types import Group, Sample


def samples_of_groups(groups: Sequence[Group], config: RunConfig, version: int) -> list[Sample]:
    """One sample per response, groups in order, advantages within each group.

    Overlong filtering keeps truncated responses out of the loss, while their rewards stay in the group's
    statistics. Responses older than weight `version` are marked as not fresh.
    """
    samples = []
    for group in groups:
        rewards = [scored.reward for scored in group.responses]
        advantages = group_advantages(rewards, config.algorithm.advantage)
        prompt = group.prompt.token_ids
        for scored, advantage in zip(group.responses, advantages, strict=True):
            response = scored.response
            truncated = response.finish_reason == "length"
            samples.append(
                Sample(
                    token_ids=np.concatenate([prompt, response.token_ids]),
                    prompt_length=len(prompt),
                    advantage=float(advantage),
                    in_loss=not (truncated and config.reward.overlong_filtering),
                    rollout_logprobs=response.logprobs,
                    is_fresh=response.weight_version == version,
                )
            )
    return samples


@dataclass(frozen=True)
class StepBatch:
    """`mini_batches[i]` are this rank's micro-batches of the i-th optimizer update of one pass over the step."""

    mini_batches: tuple[tuple[MicroBatch, ...], ...]
    packing_efficiency: float
    """Real tokens over token budget of all ranks' micro-batches."""


def pack_step(
    columns: SampleColumns,
    config: RunConfig,
    *,
    data_rank: int,
    data_size: int,
    multiple_of: int,
    attention_cost: float,
) -> StepBatch:
    """Cut the step into mini-batches of whole groups and pack each one for this data-parallel rank."""
    per_update = config.batch.mini_batch_groups * config.batch.group_size
    if len(columns) % per_update:
        raise ValueError(f"{len(columns)} samples do not make whole mini-batches of {per_update}")
    budget = config.batch.tokens_per_microbatch
    mini_batches = []
    num_micro_batches = 0
    for start in range(0, len(columns), per_update):
        plan = plan_micro_batches(columns.lengths[start : start + per_update], data_size, budget, attention_cost)
        num_micro_batches += data_size * len(plan[0])
        mini_batches.append(
            tuple(
                build_micro_batch(
                    columns,
                    [start + i for i in indices],
                    aggregation=config.algorithm.aggregation,
                    max_response_tokens=config.rollout.max_response_tokens,
                    multiple_of=multiple_of,
                )
                for indices in plan[data_rank]
            )
        )
    efficiency = float(columns.lengths.sum()) / (num_micro_batches * budget)
    return StepBatch(tuple(mini_batches), efficiency)
