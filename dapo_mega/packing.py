"""Samples to packed micro-batches: no padding between sequences, equal count on every data-parallel rank.

A step's samples first become `SampleColumns`, flat arrays that travel between processes as tensors. Every rank
then computes the same plan from the lengths alone and builds only its own micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_mega.algorithms import response_weight
from dapo_mega.algorithms.aggregation import AggregationKind
from dapo_mega.types import Sample


@dataclass(frozen=True)
class SampleColumns:
    """S samples as flat arrays: `token_ids` of all samples one after the other, likewise `rollout_logprobs`.

    `lengths` and `prompt_lengths` [S] int64 are in tokens; `advantages` [S] float32; `in_loss` and `is_fresh`
    [S] uint8.
    """

    token_ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]
    in_loss: npt.NDArray[np.uint8]
    is_fresh: npt.NDArray[np.uint8]
    rollout_logprobs: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.lengths)


def columns_from_samples(samples: Sequence[Sample]) -> SampleColumns:
    """Flatten samples into columns, in the order given."""
    if not samples:
        raise ValueError("cannot build a batch of no samples")
    return SampleColumns(
        token_ids=np.concatenate([sample.token_ids for sample in samples]).astype(np.int32),
        lengths=np.array([len(sample.token_ids) for sample in samples], dtype=np.int64),
        prompt_lengths=np.array([sample.prompt_length for sample in samples], dtype=np.int64),
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float32),
        in_loss=np.array([sample.in_loss for sample in samples], dtype=np.uint8),
        is_fresh=np.array([sample.is_fresh for sample in samples], dtype=np.uint8),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs for sample in samples]).astype(np.float32),
    )


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of T positions and n segments; position t predicts the token after it.

    `tokens`, `positions`, `targets` [T] int64; `cu_seqlens` [n + 1] int32. `response_mask` [T] bool marks
    positions whose target is a response token, `loss_mask` those that count in the loss, `fresh_mask` those
    whose `rollout_logprobs` come from the weights the step starts from. `advantages`,
    `token_weights`, `rollout_logprobs` [T] float32 are 0 elsewhere. `denominator` is this micro-batch's share of
    the mini-batch's denominator. Trailing padding is a segment of its own, outside both masks.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    response_mask: Tensor
    loss_mask: Tensor
    fresh_mask: Tensor
    advantages: Tensor
    token_weights: Tensor
    rollout_logprobs: Tensor
    denominator: int
    num_tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


def plan_micro_batches(
    lengths: npt.NDArray[np.int64], num_ranks: int, token_budget: int, attention_cost: float = 0.0
) -> list[list[list[int]]]:
    """Assign samples to ranks and micro-batches: `plan[rank][micro_batch]` lists sample indices.

    Every rank gets the same number of micro-batches, as few as fit `token_budget` tokens each. Samples are
    placed longest first on the least loaded micro-batch, where a sample of length L costs
    L * (1 + attention_cost * L). Micro-batches may be empty when there are fewer samples than micro-batches.
    Raises ValueError for a sample over the budget.
    """
    longest = int(lengths.max())
    if longest > token_budget:
        raise ValueError(f"a sample of {longest} tokens does not fit the budget of {token_budget} per micro-batch")
    num_bins = num_ranks * max(1, -(-int(lengths.sum()) // (token_budget * num_ranks)))
    costs = lengths * (1.0 + attention_cost * lengths)
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    bins = _fill_bins(lengths, costs, order, num_bins, token_budget)
    while bins is None:
        num_bins += num_ranks
        bins = _fill_bins(lengths, costs, order, num_bins, token_budget)
    return _deal_bins(bins, costs, num_ranks)


def _fill_bins(
    lengths: npt.NDArray[np.int64],
    costs: npt.NDArray[np.float64],
    order: npt.NDArray[np.int64],
    num_bins: int,
    token_budget: int,
) -> list[list[int]] | None:
    """Longest first onto the cheapest bin with room; None when some sample finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [token_budget] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    for index in order:
        full: list[tuple[float, int]] = []
        while heap and room[heap[0][1]] < lengths[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heapq.heappop(heap)
        bins[b].append(int(index))
        room[b] -= int(lengths[index])
        heapq.heappush(heap, (cost + float(costs[index]), b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _deal_bins(bins: list[list[int]], costs: npt.NDArray[np.float64], num_ranks: int) -> list[list[list[int]]]:
    """Give every rank the same number of bins, dearest first to the rank that has cost least so far."""
    per_rank = len(bins) // num_ranks
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for cost, bin_ in sorted(((float(costs[b].sum()) if b else 0.0, b) for b in bins), key=lambda pair: -pair[0]):
        rank = min((r for r in range(num_ranks) if len(plan[r]) < per_rank), key=lambda r: load[r])
        plan[rank].append(bin_)
        load[rank] += cost
    return plan


def build_micro_batch(
    columns: SampleColumns,
    indices: Sequence[int],
    *,
    aggregation: AggregationKind,
    max_response_tokens: int,
    multiple_of: int = 1,
) -> MicroBatch:
    """Pack the samples `indices` into one micro-batch whose length is a multiple of `multiple_of`."""
    lengths = columns.lengths[list(indices)]
    num_tokens = int(lengths.sum())
    padding = -num_tokens % multiple_of if num_tokens else multiple_of
    total = num_tokens + padding
    segments = [*lengths.tolist(), padding] if padding else lengths.tolist()
    tokens = np.zeros(total, dtype=np.int64)
    floats = np.zeros((3, total), dtype=np.float32)
    masks = np.zeros((3, total), dtype=bool)
    sample_starts = np.concatenate([[0], np.cumsum(columns.lengths)])
    response_lengths = columns.lengths - columns.prompt_lengths
    response_starts = np.concatenate([[0], np.cumsum(response_lengths)])
    denominator, start = 0, 0
    for i in indices:
        length, prompt, response = int(columns.lengths[i]), int(columns.prompt_lengths[i]), int(response_lengths[i])
        tokens[start : start + length] = columns.token_ids[sample_starts[i] : sample_starts[i] + length]
        # The first response token is predicted at the last prompt position.
        predicting = slice(start + prompt - 1, start + length - 1)
        weight, share = response_weight(response if columns.in_loss[i] else 0, aggregation, max_response_tokens)
        denominator += share
        masks[0, predicting] = True
        masks[1, predicting] = bool(columns.in_loss[i])
        masks[2, predicting] = bool(columns.is_fresh[i])
        floats[0, predicting] = columns.advantages[i]
        floats[1, predicting] = weight
        floats[2, predicting] = columns.rollout_logprobs[response_starts[i] : response_starts[i] + response]
        start += length
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(np.concatenate([np.arange(s, dtype=np.int64) for s in segments])),
        targets=torch.from_numpy(np.append(tokens[1:], 0)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)),
        max_seqlen=max(segments),
        response_mask=torch.from_numpy(masks[0]),
        loss_mask=torch.from_numpy(masks[1]),
        fresh_mask=torch.from_numpy(masks[2]),
        advantages=torch.from_numpy(floats[0]),
        token_weights=torch.from_numpy(floats[1]),
        rollout_logprobs=torch.from_numpy(floats[2]),
        denominator=denominator,
        num_tokens=num_tokens,
    )
