"""Samples to packed micro-batches: no padding between sequences, equal count on every data-parallel rank.

A step's samples first become `SampleColumns`, flat arrays that travel between processes as tensors. Every rank
then computes the same plan from the lengths alone and builds only its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_mega.algorithms import response_weight
from dapo_mega.algorithms.aggregation import AggregationKind
from dapo_mega.batching.balancing import partition, partition_equal_count, rebalance
from dapo_mega.types import Sample


@dataclass(frozen=True)
class SampleColumns:
    """S samples as flat arrays: `token_ids` of all samples one after the other, likewise `rollout_logprobs`.

    `lengths`, `prompt_lengths`, `off_policy_tokens` and `engine_starts` [S] int64 are in tokens; `engines` [S] int64;
    `advantages` [S] float32; `in_loss` [S] uint8. See `Sample`.
    """

    token_ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]
    in_loss: npt.NDArray[np.uint8]
    off_policy_tokens: npt.NDArray[np.int64]
    engines: npt.NDArray[np.int64]
    engine_starts: npt.NDArray[np.int64]
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
        off_policy_tokens=np.array([sample.num_stale_tokens for sample in samples], dtype=np.int64),
        engines=np.array([sample.engine for sample in samples], dtype=np.int64),
        engine_starts=np.array([sample.engine_start for sample in samples], dtype=np.int64),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs for sample in samples]).astype(np.float32),
    )


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of T positions and n segments; position t predicts the token after it.

    `tokens`, `positions`, `targets`, `segment_ids` [T] int64; `cu_seqlens` [n + 1] int32. `response_mask` [T] bool
    marks positions whose target is a response token, `loss_mask` those that count in the loss, `fresh_mask` those whose
    `rollout_logprobs` come from the weights the step starts from; `engine_ids` [T] int64 is the number of the engine
    that sampled that token, -1 where that is not known. `advantages`, `token_weights`, `rollout_logprobs` [T] float32
    are 0 elsewhere. `denominator` is this micro-batch's share of the mini-batch's. Padding, at the end of
    samples and as a last segment of its own, has token 0, is outside all masks and does not count in `num_tokens`.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    segment_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    response_mask: Tensor
    loss_mask: Tensor
    fresh_mask: Tensor
    engine_ids: Tensor
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


Plan = list[list[list[int]]]
"""`plan[rank][micro_batch]` lists the indices of the samples in it."""

# Tolerances, relative to the mean: tokens of a micro-batch, cost of a rank.
_MICRO_BATCH_TOKENS, _RANK_COST = 0.02, 0.012


def padded_lengths(lengths: npt.NDArray[np.int64], segment_multiple: int) -> npt.NDArray[np.int64]:
    """`lengths` rounded up to multiples of `segment_multiple`, in tokens."""
    return -(-lengths // segment_multiple) * segment_multiple


def sample_costs(lengths: npt.NDArray[np.int64], attention_cost: float) -> npt.NDArray[np.float64]:
    """Estimated cost of each sample, L * (1 + attention_cost * L), in units of one token without attention."""
    return lengths * (1.0 + attention_cost * lengths)


def fewest_micro_batches(num_tokens: int, num_ranks: int, token_budget: int, count_multiple: int = 1) -> int:
    """Micro-batches per rank that `num_tokens` need at least: a multiple of `count_multiple`, 1 or more."""
    fewest = max(1, -(-num_tokens // (token_budget * num_ranks)))
    return -(-fewest // count_multiple) * count_multiple


def plan_micro_batches(
    lengths: npt.NDArray[np.int64],
    num_ranks: int,
    token_budget: int,
    attention_cost: float = 0.0,
    *,
    count_multiple: int = 1,
    segment_multiple: int = 1,
) -> Plan:
    """Assign samples to ranks and micro-batches: `plan[rank][micro_batch]` lists sample indices, ascending.

    Every rank gets the same number of micro-batches, a multiple of `count_multiple`, each within `token_budget`
    tokens. Every sample counts with its length rounded up to `segment_multiple`, and so does the budget.
    Micro-batches may be empty when there are fewer samples than micro-batches. Raises ValueError for a sample over
    the budget.

    1. Samples go into as few micro-batches as their tokens need, the longest sample first, each into the emptiest.
    2. Micro-batches are dealt to ranks, equally many to each, so that the ranks' costs are even.
    3. A local search exchanges samples between micro-batches that are too long or of ranks that cost too much.

    Where a micro-batch is over the budget after that, every rank gets one step more in the count.

    A rank's cheapest micro-batches come first and last and the dearest in the middle, each next to its likes.
    Pipeline stages work on neighbours at the same time and the slower one sets the pace; the filling and draining
    of the pipeline, where stages idle, take as long as the first and last micro-batches do.
    """
    longest = int(lengths.max())
    if longest > token_budget:
        raise ValueError(f"a sample of {longest} tokens does not fit the budget of {token_budget} per micro-batch")
    sizes = padded_lengths(lengths, segment_multiple)
    budget = -(-token_budget // segment_multiple) * segment_multiple
    costs = sample_costs(sizes, attention_cost)
    loads = np.stack([sizes, costs], axis=1).astype(np.float64)
    max_cost = float(costs.sum()) / num_ranks * (1 + _RANK_COST)
    count = fewest_micro_batches(int(sizes.sum()), num_ranks, budget, count_multiple)
    while True:
        mean_tokens = float(sizes.sum()) / (num_ranks * count)
        max_tokens = min(max(mean_tokens * (1 + _MICRO_BATCH_TOKENS), float(sizes.max())), budget)
        bins = partition(sizes, num_ranks * count)
        ranks = partition_equal_count(np.array([costs[indices].sum() for indices in bins]), num_ranks)
        dealt = [bins[b] for rank in ranks for b in rank]
        dealt = rebalance(dealt, loads, np.array([max_tokens, max_cost]), bins_per_rank=count)
        if max(int(sizes[indices].sum()) for indices in dealt) <= budget:
            break
        count += count_multiple
    plan = [dealt[first : first + count] for first in range(0, len(dealt), count)]
    return [_cheap_ends([sorted(indices) for indices in rank], costs) for rank in plan]


def _cheap_ends(micro_batches: list[list[int]], costs: npt.NDArray[np.float64]) -> list[list[int]]:
    """Ascending cost up to the middle, descending after it."""
    ascending = sorted(micro_batches, key=lambda indices: (float(costs[indices].sum()), indices))
    return ascending[0::2] + ascending[1::2][::-1]


def build_micro_batch(
    columns: SampleColumns,
    indices: Sequence[int],
    *,
    aggregation: AggregationKind,
    max_response_tokens: int,
    multiple_of: int = 1,
    segment_multiple: int = 1,
) -> MicroBatch:
    """Pack the samples `indices` into one micro-batch whose length is a multiple of `multiple_of`.

    Every sample is padded at its end, inside its own segment, to a multiple of `segment_multiple`, which divides
    `multiple_of`. With causal attention no token sees that padding.
    """
    assert multiple_of % segment_multiple == 0, f"{multiple_of=} is not a multiple of {segment_multiple=}"
    chosen = np.asarray(indices, dtype=np.int64)
    lengths, prompts = columns.lengths[chosen], columns.prompt_lengths[chosen]
    responses = lengths - prompts
    segments = padded_lengths(lengths, segment_multiple)
    filled = int(segments.sum())
    padding = -filled % multiple_of if filled else multiple_of
    if padding:
        segments = np.append(segments, padding)
    bounds = np.concatenate([[0], np.cumsum(segments)])
    starts = bounds[: len(chosen)]
    total = int(bounds[-1])
    tokens = np.zeros(total, dtype=np.int64)
    tokens[_ranges(starts, lengths)] = columns.token_ids[_ranges(_starts(columns.lengths)[chosen], lengths)]
    # The first response token is predicted at the last prompt position.
    predicting = _ranges(starts + prompts - 1, responses)
    response_starts = _starts(columns.lengths - columns.prompt_lengths)[chosen]
    counted = np.where(columns.in_loss[chosen] != 0, responses, 0).tolist()
    weights = [response_weight(length, aggregation, max_response_tokens) for length in counted]
    floats = np.zeros((3, total), dtype=np.float32)
    floats[0, predicting] = np.repeat(columns.advantages[chosen], responses)
    floats[1, predicting] = np.repeat(np.array([weight for weight, _ in weights], dtype=np.float32), responses)
    floats[2, predicting] = columns.rollout_logprobs[_ranges(response_starts, responses)]
    masks = np.zeros((3, total), dtype=bool)
    masks[0, predicting] = True
    masks[1, predicting] = np.repeat(columns.in_loss[chosen] != 0, responses)
    stale = columns.off_policy_tokens[chosen]
    masks[2, _ranges(starts + prompts - 1 + stale, responses - stale)] = True
    engine_ids = np.full(total, -1, dtype=np.int64)
    known = responses - columns.engine_starts[chosen]
    engine_ids[_ranges(starts + lengths - 1 - known, known)] = np.repeat(columns.engines[chosen], known)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(_ranges(np.zeros_like(segments), segments)),
        targets=torch.from_numpy(np.append(tokens[1:], 0)),
        segment_ids=torch.from_numpy(np.repeat(np.arange(len(segments)), segments)),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(segments.max()),
        response_mask=torch.from_numpy(masks[0]),
        loss_mask=torch.from_numpy(masks[1]),
        fresh_mask=torch.from_numpy(masks[2]),
        engine_ids=torch.from_numpy(engine_ids),
        advantages=torch.from_numpy(floats[0]),
        token_weights=torch.from_numpy(floats[1]),
        rollout_logprobs=torch.from_numpy(floats[2]),
        denominator=sum(share for _, share in weights),
        num_tokens=int(lengths.sum()),
    )


def _starts(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The integers start, start + 1, ... of every range, one range after the other; [sum of lengths]."""
    return np.arange(int(lengths.sum())) + np.repeat(starts - _starts(lengths), lengths)


def context_positions(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Positions [T / size] int64 of a packed micro-batch that context-parallel `rank` of `size` holds.

    Every segment is cut into 2 * size equal chunks; rank r holds chunks r and 2 * size - 1 - r, in that order, segment
    after segment. So causal attention costs every rank the same. This is the order of Transformer Engine's
    `thd_get_partitioned_indices` and of Megatron's rotary embedding for packed sequences.
    """
    bounds = cu_seqlens.cpu().numpy().astype(np.int64)
    segments = np.diff(bounds)
    assert not (segments % (2 * size)).any(), f"segments {segments.tolist()} are not multiples of {2 * size}"
    chunks = segments // (2 * size)
    starts = np.stack([bounds[:-1] + rank * chunks, bounds[:-1] + (2 * size - 1 - rank) * chunks], axis=1)
    return torch.from_numpy(_ranges(starts.reshape(-1), np.repeat(chunks, 2)))


def context_slice(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """What context-parallel `rank` of `size` computes on, in the order of `context_positions`.

    `cu_seqlens` and `max_seqlen` stay those of the whole micro-batch, as attention needs them. Rank 0 alone keeps
    `denominator` and `num_tokens`; on the others they are 0, so that sums over ranks are the whole's.
    """
    if size == 1:
        return micro_batch
    positions = context_positions(micro_batch.cu_seqlens, rank, size).to(micro_batch.tokens.device)
    sliced: dict[str, Any] = {
        name: value[positions]
        for name, value in vars(micro_batch).items()
        if isinstance(value, Tensor) and name != "cu_seqlens"
    }
    if rank:
        sliced.update(denominator=0, num_tokens=0)
    return replace(micro_batch, **sliced)
