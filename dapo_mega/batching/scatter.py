"""Scatters samples from rank 0 to the replicas that train on them.

Rank 0 broadcasts how many samples each micro-batch has. It then sends each replica's samples in one message, in the
order of the plan, to the replica's leader, which broadcasts it within the replica. Columns with few runs of equal
values, such as masks and advantages of whole responses, are run-length encoded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.batching.plan import PackingStats, StepPlan
from dapo_mega.batching.samples import FlatSamples, Origins, Sample

_SHARES_IN_FLIGHT = 4
_ALIGNMENT = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ScatterGroups:
    """gloo groups: `control` of all ranks, `leaders` of the replicas' leaders in the order of replicas (used by leaders
    only), `replica` of this replica's ranks, its leader first. Rank 0 leads replica 0; `data_rank` is the number of
    this rank's replica."""

    control: dist.ProcessGroup
    leaders: dist.ProcessGroup
    replica: dist.ProcessGroup
    data_rank: int


@dataclass(frozen=True)
class _Announcement:
    """The metadata that every rank gets before the samples.

    `kind` is the class of the samples and `shapes` the shapes of a row of its columns; `counts[replica][mini_batch]`
    lists the number of samples of each micro-batch.
    """

    kind: type[Sample]
    shapes: list[tuple[int, ...]]
    counts: list[list[list[int]]]
    stats: PackingStats
    engines: tuple[str, ...]


def scatter(
    samples: FlatSamples | None, plan: StepPlan | None, groups: ScatterGroups
) -> tuple[list[list[FlatSamples]], PackingStats, tuple[str, ...]]:
    """Send each replica the samples that it trains on, bit for bit. Rank 0 passes samples and plan, the others None.

    Returns the samples of this replica's k-th micro-batch of the i-th optimizer update as [i][k], the statistics, and
    the engines' URLs.
    """
    box: list[_Announcement | None] = [None]
    if samples is not None and plan is not None:
        box = [_announcement(samples, plan)]
    dist.broadcast_object_list(box, src=0, group=groups.control)
    announcement = box[0]
    assert announcement is not None
    if samples is not None and plan is not None:
        sizes, body = _send(samples, plan, groups)
    else:
        sizes, body = _receive(len(announcement.shapes), groups)
    counts = announcement.counts[groups.data_rank]
    own = decode(sizes, body, sum(map(sum, counts)), announcement)
    parts = iter(own.split([count for mini_batch in counts for count in mini_batch]))
    mini_batches = [[next(parts) for _ in mini_batch] for mini_batch in counts]
    return mini_batches, announcement.stats, announcement.engines


def _announcement(samples: FlatSamples, plan: StepPlan) -> _Announcement:
    columns = samples.columns
    counts = [
        [[len(indices) for indices in mini_batch[replica]] for mini_batch in plan.mini_batches]
        for replica in range(len(plan.mini_batches[0]))
    ]
    return _Announcement(
        kind=type(columns),
        shapes=[tuple(getattr(columns, f.name).shape[1:]) for f in fields(columns)],
        counts=counts,
        stats=plan.stats,
        engines=samples.engines,
    )


def _send(samples: FlatSamples, plan: StepPlan, groups: ScatterGroups) -> tuple[Tensor, Tensor]:
    """Rank 0: send every other leader its replica's samples; broadcast and return replica 0's, like `_receive`."""
    # Buffers must live until their sends are done.
    in_flight: deque[tuple[dist.Work | None, Tensor]] = deque()
    for replica in range(1, len(plan.mini_batches[0])):
        leader = dist.get_global_rank(groups.leaders, replica)
        for tag, tensor in enumerate(encode(samples.select(plan.samples_of(replica)))):
            in_flight.append((dist.isend(tensor, dst=leader, group=groups.leaders, tag=tag), tensor))
        while len(in_flight) > 2 * _SHARES_IN_FLIGHT:
            _wait(in_flight.popleft()[0])
    sizes, body = encode(samples.select(plan.samples_of(0)))
    _pass_on(sizes, groups)
    _pass_on(body, groups)
    for work, _ in in_flight:
        _wait(work)
    return sizes, body


def _receive(num_columns: int, groups: ScatterGroups) -> tuple[Tensor, Tensor]:
    """The encoded samples of this replica: a leader gets them from rank 0, the other ranks from their leader."""
    sizes = torch.empty(1 + num_columns, dtype=torch.int64)
    is_leader = dist.get_rank(groups.replica) == 0
    if is_leader:
        dist.recv(sizes, src=0, group=groups.leaders, tag=0)
    _pass_on(sizes, groups)
    body = torch.empty(int(sizes[0]), dtype=torch.uint8)
    if is_leader:
        dist.recv(body, src=0, group=groups.leaders, tag=1)
    _pass_on(body, groups)
    return sizes, body


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _pass_on(tensor: Tensor, groups: ScatterGroups) -> None:
    if dist.get_world_size(groups.replica) > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(groups.replica, 0), group=groups.replica)


def encode(samples: FlatSamples) -> tuple[Tensor, Tensor]:
    """(sizes, bytes). Sizes [1 + columns] int64: the number of bytes, then the number of values of each column. Bytes:
    the origins, then each column's values and, if there are fewer values than rows, the rows of each value."""
    parts, num_values = [getattr(samples.origins, f.name) for f in fields(samples.origins)], []
    for f in fields(samples.columns):
        encoded = _as_runs(getattr(samples.columns, f.name))
        num_values.append(len(encoded[0]))
        parts += encoded
    padded = []
    for part in parts:
        bits = part.contiguous().reshape(-1).view(torch.uint8)
        padded += [bits, torch.zeros(-len(bits) % _ALIGNMENT, dtype=torch.uint8)]
    body = torch.cat(padded)
    return torch.tensor([len(body), *num_values]), body


def _as_runs(column: Tensor) -> list[Tensor]:
    """[values, rows of each int32] if that is smaller than [column], else [column]."""
    if column.ndim > 1 or len(column) < 2:
        return [column]
    bits = column.view(_BITS[column.element_size()])  # Compare bits, because -0.0 must stay -0.0.
    changes = bits[1:] != bits[:-1]
    if (1 + int(changes.count_nonzero())) * (column.element_size() + 4) >= column.nbytes:
        return [column]
    ends = torch.cat([changes.nonzero()[:, 0] + 1, torch.tensor([len(column)])])
    return [column[ends - 1], ends.diff(prepend=torch.tensor([0])).int()]


def decode(sizes: Tensor, body: Tensor, num_samples: int, announcement: _Announcement) -> FlatSamples:
    """The inverse of `encode`; columns that are not run-length encoded are views of `body`."""
    start = 0

    def take(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal start
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        taken = body[start : start + num_bytes].view(dtype).view(shape)
        start += num_bytes + -num_bytes % _ALIGNMENT
        return taken

    origins = Origins(*(take(torch.int64, num_samples) for _ in fields(Origins)))
    num_rows = int(origins.lengths.sum())
    columns = {}
    for f, shape, num_values in zip(fields(announcement.kind), announcement.shapes, sizes[1:].tolist(), strict=True):
        values = take(f.metadata["dtype"], num_values, *shape)
        if num_values != num_rows:
            values = values.repeat_interleave(take(torch.int32, num_values))
        columns[f.name] = values
    return FlatSamples(announcement.kind(**columns), origins, announcement.engines)
