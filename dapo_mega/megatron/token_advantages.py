"""Advantages that need the trainer's models: a KL penalty in the reward, and the values of a critic.

Each process of the last pipeline stage has some tokens of every response: context parallelism cuts sequences. Whole
responses are put together where sums over time are taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms.advantages import VARIANCE_FLOOR
from dapo_mega.algorithms.returns import discounted_sums, generalized_advantages, is_last_of_segment
from dapo_mega.batching.microbatch import MicroBatch, context_positions
from dapo_mega.config import DistillationConfig
from dapo_mega.distributed.processes import Processes

Floats = npt.NDArray[np.float64]


def advantages_from_values(
    batches: Sequence[MicroBatch],
    values: Sequence[Tensor],
    penalties: Sequence[Tensor] | None,
    processes: Processes,
    *,
    discount: float,
    decay: float,
) -> tuple[list[MicroBatch], list[Tensor]]:
    """Generalized advantages, and the returns [N] that the critic learns: advantage + value; empty off the last stage.

    The micro-batches' advantages are the rewards of whole responses, paid at their last tokens. `values` [N] are the
    critic's before each token, and `penalties` [N] are taken off the tokens' rewards.
    """
    if not processes.is_last_stage:
        return list(batches), [torch.empty(0) for _ in batches]
    changed, returns = [], []
    for i, micro_batch in enumerate(batches):
        rewards = micro_batch.advantages
        of_tokens = penalties[i].cpu() if penalties else torch.zeros(len(rewards))
        columns = torch.stack([rewards.double(), values[i].double().cpu(), of_tokens.double()])
        whole, ids, own = _whole_responses(micro_batch, columns, processes)
        paid = whole[0] * is_last_of_segment(ids) - whole[2]
        advantages = generalized_advantages(paid, whole[1], ids, discount=discount, decay=decay)
        changed.append(micro_batch.with_advantages(torch.from_numpy(advantages)[own]))
        returns.append(torch.from_numpy(advantages + whole[1])[own].float().to(processes.device))
    return changed, returns


def subtract_following_penalties(
    batches: Sequence[MicroBatch], penalties: Sequence[Tensor], processes: Processes
) -> list[MicroBatch]:
    """Advantages minus the sum of the penalties [N] of the token itself and of all after it in its response
    (REINFORCE++, arXiv 2501.03262, eq. 8)."""
    if not processes.is_last_stage:
        return list(batches)
    changed = []
    for micro_batch, of_tokens in zip(batches, penalties, strict=True):
        whole, ids, own = _whole_responses(micro_batch, of_tokens[None], processes)
        sums = torch.from_numpy(discounted_sums(whole[0], ids, 1.0))[own]
        changed.append(micro_batch.with_advantages(micro_batch.advantages.double() - sums))
    return changed


def distilled(
    batches: Sequence[MicroBatch], distances: Sequence[Tensor], settings: DistillationConfig
) -> list[MicroBatch]:
    """Advantages reward_weight x A - coefficient x d, where the distances d [N] are log p_policy - log p_teacher. On
    average over sampled tokens, the gradient of d log p_policy is that of the token's reverse KL, given those before
    it."""
    return [
        micro.with_advantages(settings.reward_weight * micro.advantages.cpu() - settings.coefficient * of_tokens)
        for micro, of_tokens in zip(batches, distances, strict=True)
    ]


def sums_of_trajectories(
    batches: Sequence[MicroBatch], of_tokens: Sequence[Tensor], processes: Processes
) -> npt.NDArray[np.float64]:
    """The sum over the tokens of each of the step's trajectories [S], of values [N] of micro-batches. Collective."""
    ids = _trajectories(batches)
    number = torch.tensor(max((int(i.max()) + 1 for i in ids if len(i)), default=0))
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=processes.control)
    sums = torch.zeros(int(number), dtype=torch.float64)
    if processes.counts_outputs:
        for own, values in zip(ids, of_tokens, strict=True):
            sums.index_add_(0, own, values.double().cpu())
    dist.all_reduce(sums, group=processes.control)
    return sums.numpy()


def with_advantages_of(batches: Sequence[MicroBatch], advantages: Floats) -> list[MicroBatch]:
    """The micro-batches, whose tokens all have their trajectory's advantage [S]."""
    result = torch.from_numpy(advantages)
    return [micro.with_advantages(result[own]) for micro, own in zip(batches, _trajectories(batches), strict=True)]


def _trajectories(batches: Sequence[MicroBatch]) -> list[Tensor]:
    """The number of each response token's trajectory [N]."""
    return [micro.trajectories.cpu()[micro.of_responses(micro.first_segments).cpu()] for micro in batches]


def normalized(batches: Sequence[MicroBatch], processes: Processes) -> list[MicroBatch]:
    """Advantages of all tokens in the loss of the step minus their mean, over the root of their population variance
    + 1e-8. Collective. Equal advantages become 0."""
    counted = torch.empty(0, dtype=torch.float64)
    if processes.counts_outputs:
        counted = torch.cat([counted, *(micro.advantages[micro.in_loss].double().cpu() for micro in batches)])
    sums = torch.stack([torch.tensor(float(len(counted)), dtype=torch.float64), counted.sum()])
    dist.all_reduce(sums, group=processes.control)
    mean = float(sums[1] / sums[0]) if sums[0] else 0.0
    squares = (counted - mean).square().sum()
    dist.all_reduce(squares, group=processes.control)
    scale = (float(squares / sums[0]) + VARIANCE_FLOOR) ** -0.5 if sums[0] else 0.0
    return [micro.with_advantages((micro.advantages.double() - mean) * scale) for micro in batches]


def _whole_responses(micro_batch: MicroBatch, columns: Tensor, processes: Processes) -> tuple[Floats, Floats, Tensor]:
    """(values, trajectories, own): the columns [C, M] of all response tokens of the replica's micro-batch, in the order
    of the sequences, from this process's [C, N], the trajectory of each, and where among them its own are [N].
    Collective over the context group."""
    positions = micro_batch.response_rows().cpu()
    if processes.context_size > 1:
        positions = context_positions(micro_batch.cu_seqlens, processes.context_rank, processes.context_size)[positions]
    bounds = micro_batch.cu_seqlens.cpu().long()
    rows = torch.zeros(1 + len(columns), int(bounds[-1]), dtype=torch.float64)
    rows[0, positions] = 1.0
    rows[1:, positions] = columns.double().cpu()
    if processes.context_size > 1:
        rows = rows.to(processes.device)
        dist.all_reduce(rows, group=processes.context)
        rows = rows.cpu()
    is_response = rows[0] > 0
    order = is_response.nonzero()[:, 0]
    ids = micro_batch.trajectories.cpu()[torch.searchsorted(bounds, order, right=True) - 1]
    own = (is_response.cumsum(0) - 1)[positions]
    return rows[1:, order].numpy(), ids.numpy(), own
