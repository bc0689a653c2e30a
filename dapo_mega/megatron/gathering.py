"""Gathers the shards of all ranks into full tensors with Hugging Face names, in buckets.

Every rank walks the same list of all pipeline stages' parameters in the same order and sends its shards of each, so
ranks need not negotiate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.weights import ChunkLayout, local_parameter, named_parameters, owner_of
from dapo_mega.models import ShardRule, merge_shards
from dapo_mega.models.families import PlacedTensor
from dapo_mega.types import WeightBucket, WeightSpec

_ALIGNMENT = 16


@dataclass(frozen=True)
class _GatheredParameter:
    """One unit of gathering: a parameter, or the same parameter of one expert on every expert rank.

    `shape` and `dtype` are one shard's; `full_shapes` are the shapes of the Hugging Face tensors of one placed tensor.
    Contributors are numbered by shard, for experts by expert rank and shard. Each placed tensor has `num_holders`
    contributors, of which the first `num_shards` suffice.
    """

    placed: tuple[PlacedTensor, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    full_shapes: tuple[tuple[int, ...], ...]
    num_shards: int
    num_holders: int

    @property
    def is_expert(self) -> bool:
        return self.placed[0].expert is not None

    @property
    def shard_bytes(self) -> int:
        """A shard's bytes, rounded up so that the next shard in the buffer may have any dtype."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.shard_bytes * len(self.placed) * self.num_shards

    @property
    def specs(self) -> Iterator[WeightSpec]:
        """The specs of the full tensors, with their Hugging Face names."""
        for placed in self.placed:
            for name, shape in zip(placed.hf, self.full_shapes, strict=True):
                yield WeightSpec(name, self.dtype, shape)

    def contributors(self, index: int) -> range:
        """The contributors of the placed tensor at `index`, in shard order."""
        return range(index * self.num_holders, index * self.num_holders + self.num_shards)

    def owns_shard(self, contributor: int) -> bool:
        index, shard = divmod(contributor, self.num_holders)
        return index < len(self.placed) and shard < self.num_shards


@dataclass(frozen=True)
class _ShardGroup:
    """Ranks that together hold every shard of a parameter, in shard order, and the leaders of their replicas.

    `contributors` count within a pipeline stage, `leaders` within the first stage.
    """

    contributors: range
    leaders: range


@dataclass(frozen=True)
class _BucketPlan:
    """The parameters of a bucket: all dense or all experts', and all of the pipeline stage `owner`."""

    owner: int
    parameters: Sequence[_GatheredParameter]


@dataclass(frozen=True)
class _Transfer:
    """A bucket being gathered. `shards` maps a contributor to its concatenated shards [bytes], which this rank sends
    or, if it `leads`, receives."""

    plan: _BucketPlan
    leads: bool
    shards: Mapping[int, Tensor]
    works: list[dist.Work]

    def finish(self) -> None:
        """Wait until all shards have been sent and received."""
        while self.works:  # Waiting twice for one of gloo's works never returns.
            self.works.pop(0).wait()


class WeightGatherer:
    """Gathers full tensors on leaders.

    One rank that holds a shard sends it to each leader that lacks it. `bytes_sent` counts the bytes that this rank has
    sent.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], layout: ChunkLayout, processes: Processes) -> None:
        """Collective: the pipeline stages exchange the shapes and dtypes of their shards."""
        self.bytes_sent = 0
        self._layout = layout
        self._processes = processes
        self._parameters = named_parameters(chunks, layout, processes)
        self._expert_tensor_size = parallel_state.get_expert_tensor_parallel_world_size()
        self._stage_size = processes.world_size // processes.pipeline_size
        self._dense_group, self._expert_group = self._shard_groups()
        mine = {chunk: self._shapes(chunk) for chunk in layout.chunks_of(processes.pipeline_rank)}
        everyones: list[Any] = [None] * processes.pipeline_size
        dist.all_gather_object(everyones, mine, group=parallel_state.get_pipeline_model_parallel_group())
        self._gathered = [
            [
                self._gathered_parameter(placed, *shape)
                for placed, shape in zip(self._placed(chunk), everyones[owner_of(chunk, layout)][chunk], strict=True)
            ]
            for chunk in range(layout.num_chunks)
        ]
        # NCCL connects a group in its first operation, which all ranks must join; a bucket involves only some ranks.
        dist.all_reduce(torch.zeros(1, device=processes.device))

    def _shard_groups(self) -> tuple[_ShardGroup, _ShardGroup]:
        """This process's groups: for dense parameters its replica, for experts its expert-parallel processes.

        Megatron numbers the processes of a stage by tensor, context and data rank, and for experts by expert tensor,
        expert and expert data rank.
        """
        me = self._processes
        replica_size = me.tensor_size * me.context_size
        first = me.data_rank * replica_size
        dense = _ShardGroup(range(first, first + me.tensor_size), range(first, first + 1))
        size = self._expert_tensor_size * me.expert_size
        first = me.rank % self._stage_size // size * size
        leaders = range(-(-first // replica_size) * replica_size, first + size, replica_size)
        return dense, _ShardGroup(range(first, first + size), leaders)

    def _placed(self, chunk: int) -> list[tuple[PlacedTensor, ...]]:
        """The chunk's parameters; an expert's is grouped with those of the experts at the same place on other ranks."""
        tensors = list(self._layout.tensors(chunk))
        alone: list[tuple[PlacedTensor, ...]] = [(placed,) for placed in tensors if placed.expert is None]
        experts = [placed for placed in tensors if placed.expert is not None]
        if not experts:
            return alone
        assert self._layout.arch.experts
        number = self._layout.arch.experts.number
        here = number // self._processes.expert_size
        # `experts` lists all experts of one parameter, then all of the next.
        together = [
            tuple(experts[start + slot : start + number : here])
            for start in range(0, len(experts), number)
            for slot in range(here)
        ]
        return alone + together

    def _gathered_parameter(
        self, placed: tuple[PlacedTensor, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> _GatheredParameter:
        num_holders = self._processes.tensor_size if placed[0].expert is None else self._expert_tensor_size
        num_shards = 1 if placed[0].layout is ShardRule.REPLICATED else num_holders
        shard = torch.empty(shape, dtype=dtype, device="meta")
        full = merge_shards([shard] * num_shards, placed[0].layout, self._layout.arch)
        full_shapes = tuple(tuple(tensor.shape) for tensor in full)
        return _GatheredParameter(placed, shape, dtype, full_shapes, num_shards, num_holders)

    def _shapes(self, chunk: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        shards = [self._mine(placed) for placed in self._placed(chunk)]
        return [(tuple(shard.shape), shard.dtype) for shard in shards]

    def _mine(self, placed: tuple[PlacedTensor, ...]) -> Tensor:
        mine = local_parameter(self._parameters, placed[self._processes.expert_rank if len(placed) > 1 else 0])
        # FP8 parameters refuse the views that full tensors are merged of, and consumers do not know their type.
        return mine.dequantize() if is_float8tensor(mine) else mine

    def buckets(self, bucket_bytes: int, *, per_stage: bool = False) -> Iterator[WeightBucket]:
        """Full tensors on every replica's leader or, with `per_stage`, only on the first replica's leader of the
        pipeline stage that holds them.

        The next bucket is gathered while the caller reads one. Each bucket takes at most half of `bucket_bytes`, but
        holds at least one parameter (of an expert: on every expert rank). Some tensors are views of the model: copy
        those that must outlive its next update. A collective: all ranks iterate in step, and may stop after the same
        bucket. Buckets come chunk by chunk, dense parameters before experts.
        """
        started = (self._start(plan, per_stage) for plan in self._plans(bucket_bytes // 2))
        transfers = deque(islice(started, 1))
        try:
            while transfers:
                transfers.extend(islice(started, 1))
                first = transfers[0]
                yield WeightBucket(
                    stage=first.plan.owner,
                    specs=tuple(spec for parameter in first.plan.parameters for spec in parameter.specs),
                    tensors=self._merged(first) if first.leads else None,
                    is_last=len(transfers) == 1,
                )
                del first  # Free the bucket's memory before the next bucket is allocated.
                transfers.popleft().finish()
        finally:
            for transfer in transfers:
                transfer.finish()

    def _plans(self, limit: int) -> Iterator[_BucketPlan]:
        """Buckets of at most `limit` bytes. In each, large elements come first, so that every tensor of the flattened
        bucket is aligned without padding."""
        for chunk, parameters in enumerate(self._gathered):
            owner = owner_of(chunk, self._layout)
            pending: list[_GatheredParameter] = []
            size = 0
            for together in _inseparable(parameters):
                num_bytes = sum(parameter.num_bytes for parameter in together)
                if pending and (size + num_bytes > limit or together[0].is_expert != pending[0].is_expert):
                    yield _BucketPlan(owner, sorted(pending, key=_falling_item_size))
                    pending, size = [], 0
                pending += together
                size += num_bytes
            yield _BucketPlan(owner, sorted(pending, key=_falling_item_size))

    def _group(self, plan: _BucketPlan) -> _ShardGroup:
        return self._expert_group if plan.parameters[0].is_expert else self._dense_group

    def _start(self, plan: _BucketPlan, per_stage: bool) -> _Transfer:
        """Start sending this rank's shards to the leaders that lack them, and receiving if this rank is a leader."""
        me = self._processes.rank
        group = self._group(plan)
        first = plan.owner * self._stage_size
        leaders = group.leaders
        if per_stage:
            leaders = range(first, first + 1) if 0 in group.contributors else range(0)
        shards: dict[int, Tensor] = {}
        operations: list[dist.P2POp] = []
        for contributor, rank in enumerate(group.contributors):
            source = first + rank
            held = [parameter for parameter in plan.parameters if parameter.owns_shard(contributor)]
            receivers = [leader for leader in leaders if leader != source]
            takes_part = bool(receivers) if source == me else me in receivers
            if not held or not takes_part:
                continue
            row = torch.empty(sum(p.shard_bytes for p in held), dtype=torch.uint8, device=self._processes.device)
            if source == me:
                for shard, parameter in zip(_shards(row, held), held, strict=True):
                    shard.copy_(self._mine(parameter.placed).detach())
                operations += [dist.P2POp(dist.isend, row, leader) for leader in receivers]
                self.bytes_sent += row.nbytes * len(receivers)
            else:
                operations.append(dist.P2POp(dist.irecv, row, source))
            shards[contributor] = row
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Transfer(plan, me in leaders, shards, works)

    def _merged(self, transfer: _Transfer) -> Iterator[Tensor]:
        """Full tensors on a leader; each is merged when the iterator reaches it."""
        transfer.finish()
        plan = transfer.plan
        shards: dict[int, Iterator[Tensor]] = {}
        for contributor, rank in enumerate(self._group(plan).contributors):
            held = [parameter for parameter in plan.parameters if parameter.owns_shard(contributor)]
            if plan.owner * self._stage_size + rank == self._processes.rank:
                shards[contributor] = (self._mine(parameter.placed).detach() for parameter in held)
            elif held:
                shards[contributor] = _shards(transfer.shards[contributor], held)
        for parameter in plan.parameters:
            for index, placed in enumerate(parameter.placed):
                parts = [next(shards[contributor]) for contributor in parameter.contributors(index)]
                yield from merge_shards(parts, placed.layout, self._layout.arch)


def _falling_item_size(parameter: _GatheredParameter) -> int:
    return -parameter.dtype.itemsize


def _inseparable(parameters: Iterable[_GatheredParameter]) -> Iterator[list[_GatheredParameter]]:
    """The parameters in order, each alone except those that an engine must get in one call: SGLang fuses the two down
    projections of latent attention once it has both, and forgets a single one between calls."""
    together: list[_GatheredParameter] = []
    is_fused = False
    for parameter in parameters:
        name = parameter.placed[0].hf[0]
        is_fused = (is_fused or name.endswith(".q_a_proj.weight")) and ".kv_a_proj" not in name
        together.append(parameter)
        if not is_fused:
            yield together
            together = []


def _shards(row: Tensor, held: Iterable[_GatheredParameter]) -> Iterator[Tensor]:
    """One contributor's shards of the parameters that it holds, as views of its row [bytes]."""
    start = 0
    for parameter in held:
        end = start + math.prod(parameter.shape) * parameter.dtype.itemsize
        yield row[start:end].view(parameter.dtype).view(parameter.shape)
        start += parameter.shard_bytes
