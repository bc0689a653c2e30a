"""Gathers the shards of all ranks into full tensors with Hugging Face names, in buckets.

Every rank walks the same list of all pipeline stages' parameters in the same order and sends its shards of each, so
ranks need not negotiate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.core.groups import expert_tensor_group, pipeline_group
from dapo_mega.megatron.core.layers import is_fp8
from dapo_mega.megatron.weights import ChunkLayout, local_parameter, named_parameters, owner_of
from dapo_mega.models import ShardRule, merge_shards
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.layouts import stack_name, stacked, stacks
from dapo_mega.types import Receivers, WeightBucket, WeightSpec

_ALIGNMENT = 16
# So many buckets of equal size per process keep their bytes equal within the number's inverse.
_FEWEST_BUCKETS = 10
# A smaller bucket takes an engine longer than its bytes do.
_SMALLEST_BUCKET = 16 * 2**20


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

    def owns_shard(self, contributor: int) -> bool:
        index, shard = divmod(contributor, self.num_holders)
        return index < len(self.placed) and shard < self.num_shards


@dataclass(frozen=True)
class _BucketPlan:
    """The parameters of a bucket: all dense or all experts', and all of the pipeline stage `owner`."""

    owner: int
    parameters: Sequence[_GatheredParameter]

    @property
    def num_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters)

    @cached_property
    def specs(self) -> tuple[WeightSpec, ...]:
        """Of the tensors as they are on disk: experts that are stacked there have one together."""
        found = [spec for parameter in self.parameters for spec in parameter.specs]
        parts = stacks(spec.name for spec in found)
        specs = {stack_name(spec.name): spec for spec in found}
        return tuple(
            specs[name] if [name] == of else WeightSpec(name, specs[name].dtype, (len(of), *specs[name].shape))
            for name, of in parts.items()
        )


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
    """Gathers full tensors on leaders, or each bucket on the process that sends it.

    One rank that holds a shard sends it to each receiver that lacks it. `bytes_sent` counts the bytes that this rank
    has sent.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        layout: ChunkLayout,
        processes: Processes,
        merged: Callable[[PlacedTensor, Tensor], Tensor] = lambda placed, shard: shard,
    ) -> None:
        """Collective: the pipeline stages exchange the shapes and dtypes of their shards. `merged(placed, shard)` is
        what is gathered of a shard."""
        self.bytes_sent = 0
        self._merged_shard = merged
        self._rounds = cache(self._planned)  # Every update sends the same.
        self._layout = layout
        self._processes = processes
        self._expert_tensor_size = expert_tensor_group().size()
        self._stage_size = processes.world_size // processes.pipeline_size
        self._dense_group = self._group_of(processes.tensor_size)
        self._expert_group = self._group_of(self._expert_tensor_size * processes.expert_size)
        parameters = named_parameters(chunks, layout, processes)
        # By unit of gathering: what this rank holds of it, and whether that is in FP8.
        self._held: dict[tuple[PlacedTensor, ...], tuple[PlacedTensor, Tensor, bool]] = {}
        mine: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
        for chunk in layout.chunks_of(processes.pipeline_rank):
            mine[chunk] = []
            for placed in self._placed(chunk):
                here = placed[processes.expert_rank if len(placed) > 1 else 0]
                shard = local_parameter(parameters, here)
                self._held[placed] = here, shard, is_fp8(shard)
                mine[chunk].append((tuple(shard.shape), shard.dtype))
        everyones: list[Any] = [None] * processes.pipeline_size
        dist.all_gather_object(everyones, mine, group=pipeline_group())
        self._gathered = [
            [
                self._gathered_parameter(placed, *shape)
                for placed, shape in zip(self._placed(chunk), everyones[owner_of(chunk, layout)][chunk], strict=True)
            ]
            for chunk in range(layout.num_chunks)
        ]
        # NCCL connects a group in its first operation, which all ranks must join; a bucket involves only some ranks.
        dist.all_reduce(torch.zeros(1, device=processes.device))

    def _group_of(self, size: int) -> range:
        """This process's group of `size` neighbours in the stage, which together hold every shard, in shard order.

        Megatron numbers the processes of a stage by tensor, context and data rank, and for experts by expert tensor,
        expert and expert data rank.
        """
        first = self._processes.rank % self._stage_size // size * size
        return range(first, first + size)

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

    def _mine(self, placed: tuple[PlacedTensor, ...]) -> Tensor:
        mine, shard, has_fp8 = self._held[placed]
        # FP8 parameters refuse the views that full tensors are merged of, and consumers do not know their type.
        return self._merged_shard(mine, shard.dequantize() if has_fp8 else shard)

    def weights(
        self, bucket_bytes: int, to: Receivers = "leaders", replicas: Collection[int] | None = None
    ) -> Iterator[WeightBucket]:
        """See `WeightSource`. The next round is gathered while the caller reads this one's bucket.

        Each bucket takes at most half of `bucket_bytes`, but holds at least one parameter (of an expert: on every
        expert rank); there are smaller ones where senders would get unequal numbers of bytes. Some tensors are views of
        the model: copy those that must outlive its next update. All ranks iterate in step, and may stop after the same
        round. Leaders get buckets chunk by chunk, dense parameters before experts.
        """
        receiving = range(self._processes.data_size) if replicas is None else replicas
        ranks = [self._processes.of_replica(replica) for replica in receiving]
        rounds = self._rounds(bucket_bytes, to)
        started = (
            [self._start(plan, [of_replica[number] for of_replica in ranks]) for plan, number in buckets]
            for buckets in rounds
        )
        ahead = next(started, None)
        try:
            for number, buckets in enumerate(rounds):
                mine = _finished(ahead or ())
                ahead = None  # Free the memory of shards that were sent before the next round's is allocated.
                ahead = next(started, None)
                plan, tensors = (mine.plan, self._merged(mine)) if mine else (buckets[0][0], None)
                yield WeightBucket(plan.owner, plan.specs, tensors, is_last=number == len(rounds) - 1)
                del mine, tensors
        finally:
            _finished(ahead or ())

    def weight_plan(self, bucket_bytes: int) -> list[list[WeightBucket]]:
        """See `WeightSource`."""
        return [
            [WeightBucket(plan.owner, plan.specs, None, is_last=False, sender=sender) for plan, sender in buckets]
            for buckets in self._rounds(bucket_bytes, "senders")
        ]

    def _planned(self, bucket_bytes: int, to: Receivers) -> list[list[tuple[_BucketPlan, int]]]:
        """The buckets of each round, each with the number of the process of a replica that gets it."""
        per_stage = self._processes.per_stage
        limits = [bucket_bytes // 2] * self._layout.pipeline_size
        if to != "senders":
            return [[(plan, plan.owner * per_stage * (to == "stage_leaders"))] for plan in self._plans(limits)]
        sizes = [0] * self._layout.pipeline_size
        for chunk, parameters in enumerate(self._gathered):
            sizes[owner_of(chunk, self._layout)] += sum(parameter.num_bytes for parameter in parameters)
        plans = list(self._plans([bucket_limit(size, per_stage, bucket_bytes // 2) for size in sizes]))
        rounds: list[list[tuple[_BucketPlan, int]]] = []
        for stage in range(self._layout.pipeline_size):
            of_stage = [plan for plan in plans if plan.owner == stage]
            for number, together in enumerate(rounds_of([plan.num_bytes for plan in of_stage], per_stage)):
                if number == len(rounds):
                    rounds.append([])
                rounds[number] += [(of_stage[index], stage * per_stage + offset) for offset, index in together]
        return rounds

    def _plans(self, limits: Sequence[int]) -> Iterator[_BucketPlan]:
        """Buckets of at most the number of bytes that `limits` has for their stage. In each, large elements come first,
        so that every tensor of the flattened bucket is aligned without padding."""
        for chunk, parameters in enumerate(self._gathered):
            owner = owner_of(chunk, self._layout)
            buckets: list[list[_GatheredParameter]] = [[]]
            size = 0
            for together in _inseparable(parameters):
                num_bytes = sum(parameter.num_bytes for parameter in together)
                last = buckets[-1]
                if last and (size + num_bytes > limits[owner] or together[0].is_expert != last[0].is_expert):
                    buckets.append([])
                    size = 0
                buckets[-1] += together
                size += num_bytes
            for bucket in filter(None, buckets):  # A chunk without layers has no adapters.
                yield _BucketPlan(owner, sorted(bucket, key=lambda parameter: -parameter.dtype.itemsize))

    def _group(self, plan: _BucketPlan) -> range:
        return self._expert_group if plan.parameters[0].is_expert else self._dense_group

    def _start(self, plan: _BucketPlan, ranks: Iterable[int]) -> _Transfer:
        """Start sending this rank's shards to those of the ranks that lack them, and receiving if this rank is one."""
        me = self._processes.rank
        group = self._group(plan)
        first = plan.owner * self._stage_size
        leaders = [rank for rank in ranks if rank % self._stage_size in group]
        shards: dict[int, Tensor] = {}
        operations: list[dist.P2POp] = []
        for contributor, rank in enumerate(group):
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
        """Full tensors as they are on disk on a leader; each is merged when the iterator reaches it."""
        transfer.finish()
        plan = transfer.plan
        shards: dict[int, Iterator[Tensor]] = {}
        for contributor, rank in enumerate(self._group(plan)):
            held = [parameter for parameter in plan.parameters if parameter.owns_shard(contributor)]
            if plan.owner * self._stage_size + rank == self._processes.rank:
                shards[contributor] = (self._mine(parameter.placed).detach() for parameter in held)
            elif held:
                shards[contributor] = _shards(transfer.shards[contributor], held)
        arch = self._layout.arch

        def merged() -> Iterator[tuple[str, Tensor]]:
            for parameter in plan.parameters:
                for index, placed in enumerate(parameter.placed):
                    first = index * parameter.num_holders
                    parts = [next(shards[first + shard]) for shard in range(parameter.num_shards)]
                    yield from zip(placed.hf, merge_shards(parts, placed.layout, arch), strict=True)

        yield from stacked(merged(), arch.experts.number if arch.experts else 0)


def _finished(transfers: Iterable[_Transfer]) -> _Transfer | None:
    """The transfer that this process receives, if any, once all of them have ended."""
    mine = None
    for transfer in transfers:
        transfer.finish()
        mine = transfer if transfer.leads else mine
    return mine


def _inseparable(parameters: Iterable[_GatheredParameter]) -> Iterator[list[_GatheredParameter]]:
    """The parameters in order, each alone except those that make a stack of experts, and those that an engine must get
    in one call: SGLang fuses the two down projections of latent attention once it has both, and forgets a single one
    between calls."""
    together: list[_GatheredParameter] = []
    is_fused = False
    for name, of_stack in itertools.groupby(parameters, lambda parameter: stack_name(parameter.placed[0].hf[0])):
        is_fused = (is_fused or name.endswith(".q_a_proj.weight")) and ".kv_a_proj" not in name
        together += of_stack
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


def bucket_limit(num_bytes: int, num_senders: int, limit: int) -> int:
    """The size limit of buckets of a stage's `num_bytes`, at most `limit`: small enough that `num_senders` processes
    can send about the same number of bytes."""
    if num_senders == 1:
        return limit
    return min(limit, max(num_bytes // (num_senders * _FEWEST_BUCKETS), _SMALLEST_BUCKET))


def rounds_of(sizes: Sequence[int], num_senders: int) -> Iterator[list[tuple[int, int]]]:
    """The buckets of each round, as senders with indices into `sizes`: in a round every sender has at most one.

    The largest bucket goes first, each to the sender with the fewest bytes, so that a round's buckets are of similar
    size and all senders get about the same number of bytes.
    """
    buckets: list[list[int]] = [[] for _ in range(num_senders)]
    totals = [0] * num_senders
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        sender = totals.index(min(totals))
        buckets[sender].append(index)
        totals[sender] += sizes[index]
    for number in range(max(map(len, buckets))):
        yield [(sender, indices[number]) for sender, indices in enumerate(buckets) if number < len(indices)]
