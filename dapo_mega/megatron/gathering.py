"""Shards of all processes to full tensors under their Hugging Face names, in buckets, by the family's table.

Every process walks the same list of parameters of all pipeline stages in the same order, so gathering needs no
negotiation: a stage's processes contribute when their parameters come up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, cycle, groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.weights import ChunkLayout, local_parameter, named_parameters, owner_of
from dapo_mega.models import Architecture, ShardRule, merge_parts, merge_shards
from dapo_mega.models.families import PlacedTensor
from dapo_mega.types import StageBucket


@dataclass(frozen=True)
class _GatheredParameter:
    """What is gathered together: one parameter, or the same parameter of one expert on every expert rank.

    `shape` and `dtype` are those of one shard. Contributors are numbered by their shard, experts' by expert rank and
    shard: of `num_holders` to a placed tensor, the first `num_shards` are needed.
    """

    placed: tuple[PlacedTensor, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_shards: int
    num_holders: int

    @property
    def is_expert(self) -> bool:
        return self.placed[0].expert is not None

    @property
    def shard_bytes(self) -> int:
        """Rounded up, so that the shard after this one can be of any dtype."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.shard_bytes * len(self.placed) * self.num_shards

    def contributors(self, index: int) -> range:
        """Who holds the shards of the placed tensor at `index`, in order."""
        return range(index * self.num_holders, index * self.num_holders + self.num_shards)

    def owns_shard(self, contributor: int) -> bool:
        index, shard = divmod(contributor, self.num_holders)
        return index < len(self.placed) and shard < self.num_shards


_ALIGNMENT = 16


@dataclass(frozen=True)
class _ShardGroup:
    """Processes that hold all shards of a kind of parameter between them, in order of their shards, and the leaders
    they send them to: ranks within a pipeline stage, the leaders' within the first."""

    contributors: range
    leaders: range


@dataclass(frozen=True)
class _BucketPlan:
    """A bucket of the pipeline stage `owner` before it is filled.

    `tensors` are stand-ins for the full tensors; those that are `copied` take memory of the bucket. Neighbours with the
    same number in `pieces` are one piece.
    """

    owner: int
    units: Sequence[_GatheredParameter]
    tensors: Sequence[Tensor]
    copied: Sequence[bool]
    pieces: Sequence[int]

    @cached_property
    def copied_bytes(self) -> int:
        return sum(tensor.nbytes for tensor, is_copied in zip(self.tensors, self.copied, strict=True) if is_copied)

    @cached_property
    def description(self) -> StageBucket:
        """What every process knows of the bucket."""
        return StageBucket(
            stage=self.owner,
            names=tuple(name for unit in self.units for placed in unit.placed for name in placed.hf),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors),
            shapes=tuple(tuple(tensor.shape) for tensor in self.tensors),
            piece_lengths=tuple(len(list(run)) for _, run in groupby(self.pieces)),
            pieces=None,
            is_last=False,
        )


_Merge = Callable[[Sequence[Tensor], ShardRule, Architecture], list[Tensor]]

# Broadcasts of less take longer than a copy.
_OWN_PIECE_BYTES = 2**20
_SHARED_PIECE = -1


@dataclass(frozen=True)
class _Transfer:
    """A bucket on its way from stage `owner`: `rows` are the shards [bytes] that this process sends or, where it leads,
    receives, by contributor."""

    owner: int
    units: Sequence[_GatheredParameter]
    leads: bool
    rows: Mapping[int, Tensor]
    works: list[dist.Work]

    def finish(self) -> None:
        """Wait until all shards are there or gone."""
        while self.works:  # Waiting for one of gloo's twice takes for ever.
            self.works.pop(0).wait()


class WeightGatherer:
    """Streams sharded weights as full tensors under their Hugging Face names to the replicas' leaders.

    Every shard goes straight from one process that holds it to each leader that does not; `bytes_sent` counts what
    this process has sent.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], layout: ChunkLayout, processes: Processes) -> None:
        """Collective: pipeline stages tell each other the shapes and dtypes of their shards once."""
        self.bytes_sent = 0
        self._full_of: dict[tuple[ShardRule, tuple[int, ...], torch.dtype, int], tuple[list[Tensor], bool]] = {}
        self._plans: dict[tuple[int, int | None], list[_BucketPlan]] = {}
        self._kept: list[Tensor] = []
        self._layout = layout
        self._processes = processes
        self._parameters = named_parameters(chunks, layout, processes)
        self._expert_tensor_size = parallel_state.get_expert_tensor_parallel_world_size()
        self._stage_size = processes.world_size // processes.pipeline_size
        self._dense_circle, self._expert_circle = self._circles()
        mine = {chunk: self._shapes(chunk) for chunk in layout.chunks_of(processes.pipeline_rank)}
        everyones: list[Any] = [None] * processes.pipeline_size
        dist.all_gather_object(everyones, mine, group=parallel_state.get_pipeline_model_parallel_group())
        self._units = [
            [
                self._unit(placed, *shape)
                for placed, shape in zip(self._placed(chunk), everyones[owner_of(chunk, layout)][chunk], strict=True)
            ]
            for chunk in range(layout.num_chunks)
        ]
        # NCCL connects a group in its first operation, which all processes must join; a bucket concerns only some.
        dist.all_reduce(torch.zeros(1, device=processes.device))

    def _circles(self) -> tuple[_ShardGroup, _ShardGroup]:
        """Of this process's replica, and of its expert-parallel processes. Megatron numbers the processes of a stage
        tensor, context, data, and for experts expert tensor, expert, expert data."""
        me = self._processes
        replica_size = me.tensor_size * me.context_size
        first = me.data_rank * replica_size
        dense = _ShardGroup(range(first, first + me.tensor_size), range(first, first + 1))
        size = self._expert_tensor_size * me.expert_size
        first = me.rank % self._stage_size // size * size
        leaders = range(-(-first // replica_size) * replica_size, first + size, replica_size)
        return dense, _ShardGroup(range(first, first + size), leaders)

    def _placed(self, chunk: int) -> list[tuple[PlacedTensor, ...]]:
        """Parameters of a chunk; an expert's together with those that take its place on the other expert ranks."""
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

    def _unit(self, placed: tuple[PlacedTensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> _GatheredParameter:
        num_holders = self._processes.tensor_size if placed[0].expert is None else self._expert_tensor_size
        num_shards = 1 if placed[0].layout is ShardRule.REPLICATED else num_holders
        return _GatheredParameter(placed, shape, dtype, num_shards, num_holders)

    def _shapes(self, chunk: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        shards = [self._mine(placed) for placed in self._placed(chunk)]
        return [(tuple(shard.shape), shard.dtype) for shard in shards]

    def _mine(self, placed: tuple[PlacedTensor, ...]) -> Tensor:
        return local_parameter(self._parameters, placed[self._processes.expert_rank if len(placed) > 1 else 0])

    def buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors in buckets. One is on its way while the one before is used; both together take at most
        `bucket_bytes`, but each holds at least one parameter (of an expert: on every expert rank).

        A collective: all processes must iterate to the end in step. Buckets come chunk by chunk, dense parameters
        before experts; they are filled on the replicas' leaders and empty on the other processes. Tensors may be the
        model's own: copy what is to outlive its next update.
        """
        before: _Transfer | None = None
        for owner, units in self._planned(bucket_bytes // 2):
            transfer = self._start(owner, units, self._circle(units).leaders)
            if before:
                yield list(self._finish(before))
            before = transfer
        assert before
        yield list(self._finish(before))

    def stage_buckets(self, bucket_bytes: int, most_bytes: int | None = None) -> Iterator[StageBucket]:
        """Full tensors on the leader of the pipeline stage that holds them, in the first replica only.

        A bucket is one piece. With `most_bytes` each large parameter is one, which is ready only when it is read; those
        that need no gathering are the policy's own memory, and a bucket holds as many of them as make `most_bytes` with
        everything else. The caller may still be sending a bucket when it asks for the next: these and the shards on
        their way take at most twice `bucket_bytes` together, but each bucket holds at least one parameter (of an
        expert: on every expert rank). The memory of a bucket is used again for the one after the next, also of a later
        call. A collective: all processes iterate in step, and may stop after the same bucket.
        """
        in_place = most_bytes is not None
        key = bucket_bytes, most_bytes
        if key not in self._plans:
            planned = self._planned(bucket_bytes * 2 // 3, most_bytes)
            self._plans[key] = [self._cargo(owner, units, in_place) for owner, units in planned]
        plan = self._plans[key]
        buffers = cycle(self._buffers([cargo.copied_bytes for cargo in plan if self._is_stage_source(cargo.owner)]))
        for number, cargo in enumerate(plan, start=1):
            leader = cargo.owner * self._stage_size
            in_first_replica = 0 in self._circle(cargo.units).contributors
            transfer = self._start(cargo.owner, cargo.units, range(leader, leader + in_first_replica))
            pieces = self._pieces(next(buffers), cargo, transfer) if self._is_stage_source(cargo.owner) else None
            try:
                yield replace(
                    cargo.description,
                    pieces=pieces if in_place or pieces is None else tuple(pieces),
                    is_last=number == len(plan),
                )
            finally:
                transfer.finish()
            del transfer, pieces  # Their memory is free before the next shards get theirs.

    def _buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory [bytes] for buckets of these sizes, two at a time."""
        device = self._processes.device
        if device.type == "cuda":
            return [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes[:2]]
        # On the CPU it is kept for the next update: touching fresh pages takes longer than filling them.
        wanted = [max(sizes)] * min(len(sizes), 2) if sizes else []
        if [len(buffer) for buffer in self._kept] != wanted:
            self._kept = [torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in wanted]
        return self._kept

    def _is_stage_source(self, stage: int) -> bool:
        """Whether this process leads the stage in the first replica."""
        return self._processes.rank == stage * self._stage_size

    def _is_large(self, unit: _GatheredParameter) -> bool:
        """Whether each of its placed tensors is a piece of its own, where a bucket may be several."""
        return sum(tensor.nbytes for tensor in self._full_tensors(unit)[0]) >= _OWN_PIECE_BYTES

    def _stays(self, unit: _GatheredParameter) -> bool:
        """Whether it is sent from where it lies then. Of experts on several processes most come from elsewhere."""
        return len(unit.placed) == 1 and self._is_large(unit) and self._full_tensors(unit)[1]

    def _cargo(self, owner: int, units: Sequence[_GatheredParameter], in_place: bool) -> _BucketPlan:
        def is_alone(unit: _GatheredParameter) -> bool:
            return in_place and self._is_large(unit)

        # In falling order of the size of an element everything is aligned without padding; all that share a piece
        # follow each other.
        units = sorted(units, key=lambda unit: (-unit.dtype.itemsize, not is_alone(unit)))
        tensors: list[Tensor] = []
        copied: list[bool] = []
        pieces: list[int] = []
        for unit in units:
            full, is_shard = self._full_tensors(unit)
            for _ in unit.placed:
                pieces += [len(tensors) if is_alone(unit) else _SHARED_PIECE] * len(full)
                copied += [not (is_alone(unit) and is_shard)] * len(full)
                tensors += full
        return _BucketPlan(owner, units, tensors, copied, pieces)

    def _pieces(self, memory: Tensor, cargo: _BucketPlan, transfer: _Transfer) -> Iterator[Tensor]:
        """The bucket's pieces on its stage's leader in the first replica; `memory` [bytes] takes what is copied."""
        tensors = (tensor for _, tensor in self._finish(transfer, merge_parts))
        end = 0
        for _, run in groupby(zip(cargo.pieces, cargo.copied, tensors, strict=True), key=itemgetter(0)):
            _, are_copied, parts = zip(*run, strict=True)
            num_bytes = sum(part.nbytes for part in parts)
            if not are_copied[0]:
                yield parts[0].flatten().view(torch.uint8).as_strided((num_bytes,), (1,))
                continue
            piece = memory[end : end + num_bytes]
            for place, part in zip(piece.split([part.nbytes for part in parts]), parts, strict=True):
                place.view(part.dtype).view(part.shape).copy_(part)
            yield piece
            end += num_bytes

    def _full_tensors(self, unit: _GatheredParameter) -> tuple[list[Tensor], bool]:
        """Stand-ins without memory for the full tensors of a placed one, and whether these lie one after the other
        in a single shard."""
        key = (unit.placed[0].layout, unit.shape, unit.dtype, unit.num_shards)
        if key not in self._full_of:
            shard = torch.empty(unit.shape, dtype=unit.dtype, device="meta")
            full = merge_shards([shard] * unit.num_shards, unit.placed[0].layout, self._layout.arch)
            starts = [tensor.storage_offset() for tensor in full]
            are_parts = all((tensor is shard or tensor._base is shard) and tensor.is_contiguous() for tensor in full)
            self._full_of[key] = (
                full,
                are_parts and starts == list(accumulate((t.numel() for t in full[:-1]), initial=0)),
            )
        return self._full_of[key]

    def _planned(self, limit: int, most_bytes: int | None = None) -> Iterator[tuple[int, list[_GatheredParameter]]]:
        """The stage that holds a bucket's units, and these: of one kind, at most `limit` bytes. With `most_bytes` units
        that can be sent from where they lie do not count, but for a bucket's size of at most `most_bytes`."""
        for chunk, units in enumerate(self._units):
            owner = owner_of(chunk, self._layout)
            pending: list[_GatheredParameter] = []
            size = copied = 0
            for together in _inseparable(units):
                num_bytes = sum(unit.num_bytes for unit in together)
                in_place = 0 if most_bytes is None else sum(u.num_bytes for u in together if self._stays(u))
                is_full = copied + num_bytes - in_place > limit or size + num_bytes > (most_bytes or limit)
                if pending and (is_full or together[0].is_expert != pending[0].is_expert):
                    yield owner, pending
                    pending, size, copied = [], 0, 0
                pending += together
                size += num_bytes
                copied += num_bytes - in_place
            yield owner, pending

    def _circle(self, units: Sequence[_GatheredParameter]) -> _ShardGroup:
        return self._expert_circle if units[0].is_expert else self._dense_circle

    def _start(self, owner: int, units: Sequence[_GatheredParameter], leaders: range) -> _Transfer:
        """Send this process's shards to the `leaders`, and receive the others' where it is one of them."""
        me = self._processes
        rows: dict[int, Tensor] = {}
        operations: list[dist.P2POp] = []
        for contributor, rank in enumerate(self._circle(units).contributors):
            source = owner * self._stage_size + rank
            num_bytes = sum(unit.shard_bytes for unit in units if unit.owns_shard(contributor))
            if not num_bytes or not leaders or (source != me.rank and me.rank not in leaders):
                continue
            receivers = [leader for leader in leaders if leader != me.rank]
            if source == me.rank and not receivers:
                continue
            row = torch.empty(num_bytes, dtype=torch.uint8, device=me.device)
            if source == me.rank:
                for shard, unit in zip(_shards(row, units, contributor), _held(units, contributor), strict=True):
                    shard.copy_(self._mine(unit.placed).detach())
                operations += [dist.P2POp(dist.isend, row, leader) for leader in receivers]
                self.bytes_sent += num_bytes * len(receivers)
            else:
                operations.append(dist.P2POp(dist.irecv, row, source))
            rows[contributor] = row
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Transfer(owner, units, me.rank in leaders, rows, works)

    def _finish(self, transfer: _Transfer, merge: _Merge = merge_shards) -> Iterator[tuple[str, Tensor]]:
        """Full tensors on a leader, one after the other; some of them are the model's own."""
        transfer.finish()
        if not transfer.leads:
            return
        units = transfer.units
        shards = {c: _shards(row, units, c) for c, row in transfer.rows.items()}
        for contributor, rank in enumerate(self._circle(units).contributors):
            if transfer.owner * self._stage_size + rank == self._processes.rank:
                shards[contributor] = (self._mine(unit.placed).detach() for unit in _held(units, contributor))
        for unit in units:
            for index, placed in enumerate(unit.placed):
                mine = [next(shards[contributor]) for contributor in unit.contributors(index)]
                yield from zip(placed.hf, merge(mine, placed.layout, self._layout.arch), strict=True)


def _inseparable(units: Iterable[_GatheredParameter]) -> Iterator[list[_GatheredParameter]]:
    """The units in order, one by one but for those that an engine must be given in one call: SGLang fuses the two down
    projections of latent attention when it has seen both, and forgets one that comes alone."""
    together: list[_GatheredParameter] = []
    is_fused = False
    for unit in units:
        name = unit.placed[0].hf[0]
        is_fused = (is_fused or name.endswith(".q_a_proj.weight")) and ".kv_a_proj" not in name
        together.append(unit)
        if not is_fused:
            yield together
            together = []


def _held(units: Sequence[_GatheredParameter], contributor: int) -> Iterator[_GatheredParameter]:
    return (unit for unit in units if unit.owns_shard(contributor))


def _shards(row: Tensor, units: Sequence[_GatheredParameter], contributor: int) -> Iterator[Tensor]:
    """The contributor's shards as views of its row [bytes], in the order of the units."""
    start = 0
    for unit in _held(units, contributor):
        end = start + math.prod(unit.shape) * unit.dtype.itemsize
        yield row[start:end].view(unit.dtype).view(unit.shape)
        start += unit.shard_bytes
