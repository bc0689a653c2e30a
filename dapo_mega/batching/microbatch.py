"""Packs samples into micro-batches without padding between sequences, and slices them for context parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from dapo_mega.algorithms.aggregation import AggregationKind, response_weight
from dapo_mega.batching.plan import PackingLayout, padded_lengths
from dapo_mega.batching.samples import FlatSamples, Origins, Sample, ranges


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of T positions and n segments; position t predicts the token after it.

    `tokens`, `positions`, `first_segments` [T] int64; `cu_seqlens` [n + 1] int32. `trajectories` [n] int64 are the
    numbers within the step of the trajectories that the segments are of, -1 for padding; `first_segments` gives every
    position the first segment of its trajectory here. `targets` are the columns of the token that each position
    predicts: `targets.token_ids[t]` is the token, `targets.response_mask[t]` whether to score it.
    The last position of a segment predicts nothing: its columns have the value `outside` (see `Sample`), like those of
    padding. `token_weights` [T] float32 are the weights of the tokens' losses, 0 outside the loss. `denominator` is
    this micro-batch's share of the mini-batch's. Padding, at the end of samples and as an extra last segment, has token
    0 and does not count in `num_tokens`. `second_tokens` [T] are those after the predicted ones, and `second_weights`
    [T] their weights, 0 where a segment has none.
    """

    tokens: Tensor
    positions: Tensor
    first_segments: Tensor
    cu_seqlens: Tensor
    trajectories: Tensor
    max_seqlen: int
    targets: Sample
    token_weights: Tensor
    denominator: int
    num_tokens: int
    second_tokens: Tensor
    second_weights: Tensor

    def response_rows(self) -> Tensor:
        """Positions [N] that predict response tokens."""
        return self.targets.response_mask.nonzero()[:, 0]

    def of_responses(self, values: Tensor) -> Tensor:
        """The response tokens' [N], from a value of every position [T]."""
        return values[self.targets.response_mask]

    @property
    def in_loss(self) -> Tensor:
        """Which response tokens count in the loss [N]."""
        return self.of_responses(self.targets.loss_mask)

    @property
    def advantages(self) -> Tensor:
        """Those of the response tokens [N]."""
        return self.of_responses(self.targets.advantages)

    @property
    def rollout_logprobs(self) -> Tensor:
        """The engines' log-probs of the response tokens [N]."""
        return self.of_responses(self.targets.rollout_logprobs)

    def teacher_logprobs(self, of_models: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """(log-probs that its teacher gives each response token, whether it has one), each [N] on the CPU. `of_models`
        are those [N] of the teachers that have no server, by number."""
        teachers = self.of_responses(self.targets.teachers).cpu()
        found = self.of_responses(self.targets.teacher_logprobs).cpu()
        for number, logprobs in of_models.items():
            found = torch.where(teachers == number, logprobs.float().cpu(), found)
        return found, teachers >= 0

    @property
    def teacher_top(self) -> tuple[Tensor, Tensor]:
        """The most probable tokens of each response token's teacher, and their log-probs, [N, k] each."""
        targets = self.targets
        return self.of_responses(targets.teacher_top_ids), self.of_responses(targets.teacher_top_logprobs)

    def with_teacher_top(self, of_models: Mapping[int, tuple[Tensor, Tensor]]) -> MicroBatch:
        """The micro-batch with those ids and log-probs [N, k] of the teachers that have no server, by number."""
        targets = self.targets
        all_ids, all_logprobs = targets.teacher_top_ids.clone(), targets.teacher_top_logprobs.clone()
        for number, (ids, logprobs) in of_models.items():
            is_taught = targets.response_mask & (targets.teachers == number)
            own = self.of_responses(targets.teachers) == number
            all_ids[is_taught], all_logprobs[is_taught] = ids[own].to(all_ids), logprobs[own].to(all_logprobs)
        return replace(self, targets=replace(targets, teacher_top_ids=all_ids, teacher_top_logprobs=all_logprobs))

    def places(self) -> tuple[Tensor, Tensor]:
        """The sample of every response token, and the position there that predicts it, each [N] on the CPU."""
        return self.of_responses(self.targets.sample_ids).cpu(), self.of_responses(self.positions).cpu()

    def with_advantages(self, advantages: Tensor) -> MicroBatch:
        """The micro-batch with these advantages [N] of response tokens."""
        column = self.targets.advantages.clone()
        column[self.targets.response_mask] = advantages.to(column)
        return replace(self, targets=replace(self.targets, advantages=column))

    def to(self, device: torch.device) -> MicroBatch:
        """The micro-batch on another device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            first_segments=self.first_segments.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            trajectories=self.trajectories.to(device),
            targets=self.targets.map(lambda column: column.to(device)),
            token_weights=self.token_weights.to(device),
            second_tokens=self.second_tokens.to(device),
            second_weights=self.second_weights.to(device),
        )


def pack(
    samples: FlatSamples,
    layout: PackingLayout | None = None,
    *,
    aggregation: AggregationKind = "token_mean",
    max_response_tokens: int,
) -> MicroBatch:
    """Pack all samples into one micro-batch whose length is a multiple of `layout.multiple_of`.

    Every sample is padded at its end, inside its own segment, to a multiple of `layout.segment_multiple`. With causal
    attention no token sees that padding.
    """
    layout = layout or PackingLayout()
    assert layout.multiple_of % layout.segment_multiple == 0, f"{layout}: not a multiple of segment_multiple"
    segments = torch.from_numpy(padded_lengths(samples.lengths.numpy(), layout.segment_multiple))
    trajectories = samples.origins.trajectories
    filled = int(segments.sum())
    padding = -filled % layout.multiple_of if filled else layout.multiple_of
    if padding:
        segments = torch.cat([segments, torch.tensor([padding])])
        trajectories = torch.cat([trajectories, torch.tensor([-1])])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), segments.cumsum(0)])
    rows = ranges(bounds[: len(samples)], samples.lengths)
    tokens = torch.zeros(int(bounds[-1]), dtype=torch.int64)
    tokens[rows] = samples.columns.token_ids.long()
    targets = _targets(samples.columns, rows, bounds)
    _, first, inverse = np.unique(trajectories.numpy(), return_index=True, return_inverse=True)
    weights = [response_weight(n, aggregation, max_response_tokens)[0] for n in samples.origins.loss_tokens.tolist()]
    of_segments = torch.tensor([*weights, 0.0] if padding else weights).repeat_interleave(segments)
    token_weights = of_segments * targets.loss_mask
    has_second = torch.ones(len(tokens), dtype=torch.bool)
    has_second[bounds[1:] - 1] = False
    return MicroBatch(
        tokens=tokens,
        positions=ranges(torch.zeros_like(segments), segments),
        first_segments=torch.from_numpy(first[inverse]).repeat_interleave(segments),
        cu_seqlens=bounds.int(),
        trajectories=trajectories,
        max_seqlen=int(segments.max()),
        targets=targets,
        token_weights=token_weights,
        denominator=_denominator(samples.origins, targets, aggregation, max_response_tokens),
        num_tokens=int(samples.lengths.sum()),
        second_tokens=targets.token_ids.long().roll(-1) * has_second,
        second_weights=token_weights.roll(-1) * has_second,
    )


def _denominator(origins: Origins, targets: Sample, aggregation: AggregationKind, max_response_tokens: int) -> int:
    """What the samples add to the mini-batch's denominator: their tokens in the loss, or what one trajectory counts for
    each that they lead."""
    if aggregation == "token_mean":
        return int(targets.loss_mask.sum())
    return int(origins.leads.sum()) * response_weight(1, aggregation, max_response_tokens)[1]


def _targets(columns: Sample, rows: Tensor, bounds: Tensor) -> Sample:
    """Columns of the T positions; each holds the row of the next token. `rows` [N] are the positions of the samples'
    rows."""
    packed = {}
    for f in fields(columns):
        values = getattr(columns, f.name)
        shape = (int(bounds[-1]) + 1, *values.shape[1:])
        of_tokens = torch.full(shape, f.metadata["outside"], dtype=values.dtype)
        of_tokens[rows] = values
        of_tokens[bounds[:-1]] = f.metadata["outside"]  # No position predicts a segment's first token.
        packed[f.name] = of_tokens[1:]
    return type(columns)(**packed)


def context_positions(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Positions [T / size] int64 of a packed micro-batch that context-parallel `rank` of `size` holds.

    Every segment is cut into 2 * size equal chunks; rank r holds chunks r and 2 * size - 1 - r, in that order, segment
    by segment. This gives every rank the same cost of causal attention. This is the order of Transformer Engine's
    `thd_get_partitioned_indices` and of Megatron's rotary embedding for packed sequences.
    """
    bounds = cu_seqlens.cpu().long()
    segments = bounds.diff()
    assert not (segments % (2 * size)).any(), f"segments {segments.tolist()} are not multiples of {2 * size}"
    chunks = segments // (2 * size)
    starts = torch.stack([bounds[:-1] + rank * chunks, bounds[:-1] + (2 * size - 1 - rank) * chunks], dim=1)
    return ranges(starts.reshape(-1), chunks.repeat_interleave(2))


def context_slice(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """The slice of context-parallel `rank` of `size`, in the order of `context_positions`.

    `cu_seqlens` and `max_seqlen` stay the whole micro-batch's, as attention needs them. Only rank 0 keeps `denominator`
    and `num_tokens`; they are 0 on the other ranks, so that sums over ranks are right.
    """
    if size == 1:
        return micro_batch
    positions = context_positions(micro_batch.cu_seqlens, rank, size).to(micro_batch.tokens.device)

    def take(rows: Tensor) -> Tensor:
        return rows[positions]

    return replace(
        micro_batch,
        tokens=take(micro_batch.tokens),
        positions=take(micro_batch.positions),
        first_segments=take(micro_batch.first_segments),
        targets=micro_batch.targets.map(take),
        token_weights=take(micro_batch.token_weights),
        second_tokens=take(micro_batch.second_tokens),
        second_weights=take(micro_batch.second_weights),
        denominator=0 if rank else micro_batch.denominator,
        num_tokens=0 if rank else micro_batch.num_tokens,
    )
