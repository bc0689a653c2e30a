"""Process groups of any size in which one process stands for one rank.

Everything is recorded. Tensors of the host are exchanged with the other ranks that are rehearsed, each of which stands
for those like it; tensors of the device have no values to exchange.
"""

# mypy: disable-error-code="override, attr-defined, assignment, call-arg"
# The methods of ProcessGroup are those that torch.distributed calls, of several signatures each.

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dapo_mega.megatron.core import groups as parallel_groups
from dapo_mega.rehearsal.device import known_of
from dapo_mega.rehearsal.places import place

BACKEND: Final = "rehearsal"


class GroupName(NamedTuple):
    """What all members of a group call it: what Megatron says it is for, its ranks, and its number among equal ones."""

    purpose: str
    ranks: tuple[int, ...]
    number: int

    def describe(self) -> str:
        """Such as "tensor model parallel group of 4 ranks (0, 1, 2, ...)"."""
        first = ", ".join(map(str, self.ranks[:3])) + (", ..." if len(self.ranks) > 3 else "")
        purpose = self.purpose.removesuffix("_GROUP").replace("_", " ").lower() or "project's own"
        return f"{purpose} group of {len(self.ranks)} ranks ({first})"


@dataclass(frozen=True)
class Event:
    """One rank's part in one communication. `sizes` are the elements of the tensors that each member gives, `peer` is
    the other rank of a send or receive, or the one that a collective starts from or ends at. `launch` numbers what a
    rank issues: sends and receives of one batch (`is_batched`) share it, and so does the "wait" for them."""

    group: GroupName
    operation: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    peer: int | None
    is_host: bool
    phase: str
    place: str
    launch: int
    is_batched: bool

    def describe(self) -> str:
        """Such as "all_reduce of [64] float32 in the tensor model parallel group of 4 ranks (0, 1, 2, ...), at ..."."""
        sizes = ", ".join(map(str, self.sizes[:4])) + (", ..." if len(self.sizes) > 4 else "")
        peer = "" if self.peer is None else f", rank {self.peer}"
        of = str(self.dtype).removeprefix("torch.")
        return f"{self.operation} of [{sizes}] {of} in the {self.group.describe()}{peer}, at {self.place}"

    @property
    def has_values(self) -> bool:
        """Whether what is sent has values: of the device's tensors, the shapes of others."""
        return self.is_host or not self.dtype.is_floating_point

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes) * self.dtype.itemsize


class Exchange(Protocol):
    """The other rehearsed ranks."""

    def gather(self, event: Event, number: int, value: Any) -> list[Any]:
        """The values that all members give to a group's `number`-th collective, by their place in it."""

    def send(self, event: Event, tag: int, value: Any) -> None:
        """Give a value to the event's peer."""

    def receive(self, event: Event, tag: int) -> Any:
        """The next value that the event's peer gave this rank."""


class _Done(dist.Work):
    """A communication that took no time."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _UnderWay(dist.Work):
    """A value on its way; it is there once it was waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        if self._finish:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        return self._finish is None


class World:
    """The ranks of a run as one of them sees them: makes groups, and keeps what happens in them."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        self.rank, self.size, self.exchange = rank, size, exchange
        self.events: list[Event] = []
        self.phase = "start"
        self.batch: int | None = None
        """The launch of the batch of sends and receives that is being issued."""
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def start(self) -> None:
        """Make this process, which was forked for it, a rank of this world, whatever group the original is in."""
        # Its threads were not forked, so it is not ended: only forgotten.
        self._of_original = dist.distributed_c10d._world, dict(vars(parallel_groups.parallel_state))
        parallel_groups.stop_groups()
        dist.distributed_c10d._world = dist.distributed_c10d._World()
        dist.Backend.register_backend(BACKEND, self._make, extended_api=True, devices=["cpu"])
        dist.init_process_group(BACKEND, store=FakeStore(), rank=self.rank, world_size=self.size)
        make: Any = dist.new_group

        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **rest: Any) -> Any:
            self._purpose = rest.get("group_desc") or ""
            return make(ranks, timeout=timeout, backend=BACKEND, **{**rest, "pg_options": None})

        dist.new_group = dist.distributed_c10d.new_group = new_group
        issue_batch = dist.batch_isend_irecv

        def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
            self.batch = len(self.events)
            try:
                return issue_batch(operations)
            finally:
                self.batch = None

        dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch_isend_irecv

    _purpose = "all"

    def _make(self, options: Any, _: Any) -> Group:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(self.size))
        self._made[self._purpose, ranks] += 1
        name = GroupName(self._purpose, ranks, self._made[self._purpose, ranks] - 1)
        return Group(options.group_rank, options.group_size, name, self)


class Group(dist.ProcessGroup):
    """A process group; see torch.distributed.ProcessGroup for the methods."""

    def __init__(self, rank: int, size: int, label: GroupName, world: World) -> None:
        super().__init__(rank, size)
        self._own_rank, self._size, self.label, self.world = rank, size, label, world
        self._count = 0

    def size(self) -> int:
        return self._size

    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> Group:
        """Asked by torch.distributed.batch_isend_irecv whether it can send several tensors as one."""
        return self

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _note(self, operation: str, tensors: Iterable[Tensor], peer: int | None = None) -> Event:
        tensors = list(tensors)
        is_host = not any(tensor.is_meta for tensor in tensors)
        sizes = tuple(tensor.numel() for tensor in tensors)
        of_all = None if peer is None else self.label.ranks[peer]
        world, dtype = self.world, tensors[0].dtype if tensors else torch.uint8
        is_batched, where = world.batch is not None, place(sys._getframe(2))
        launch = len(world.events) if world.batch is None else world.batch
        event = Event(self.label, operation, dtype, sizes, of_all, is_host, world.phase, where, launch, is_batched)
        world.events.append(event)
        return event

    def _gather(self, event: Event, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """Everyone's tensors, of those whose values everyone knows; by rank."""
        self._count += 1
        return self.world.exchange.gather(event, self._count, [known_of(value) for value in values])

    def _collect(
        self, operation: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], combine: Any, peer: int | None = None
    ) -> dist.Work:
        """A collective: `combine(everyone's inputs)` are the values of `outputs`."""
        event = self._note(operation, inputs or outputs, peer)
        if event.is_host or all(known_of(tensor) is not None for tensor in inputs):
            everyones = self._gather(event, inputs)
            for output, value in zip(outputs, combine(everyones), strict=True):
                _put(output, value)
        else:
            for output in outputs:
                _put(output, None)
        return _Done()

    # Summing collectives.

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        return self._all_reduce("all_reduce", tensors, options.reduceOp if options else dist.ReduceOp.SUM)

    allreduce_coalesced = allreduce

    def _all_reduce(self, operation: str, tensors: Sequence[Tensor], kind: Any, peer: int | None = None) -> dist.Work:
        return self._collect(
            operation,
            tensors,
            tensors,
            lambda everyones: [_reduced(parts, kind) for parts in zip(*everyones, strict=True)],
            peer,
        )

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> dist.Work:
        # The others' tensors are undefined afterwards.
        return self._all_reduce("reduce", tensors, options.reduceOp, options.rootRank)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any = None
    ) -> dist.Work:
        return self._reduce_scatter(inputs[0], outputs, lambda parts: [parts[self._own_rank]], options)

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, options: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input_], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        return self._reduce_scatter(
            inputs, outputs, lambda parts: [part.chunk(self._size)[self._own_rank] for part in parts], options
        )

    def _reduce_scatter(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], own: Callable[[Any], list[Tensor]], options: Any
    ) -> dist.Work:
        operation = options.reduceOp if options else dist.ReduceOp.SUM
        return self._collect(
            "reduce_scatter",
            inputs,
            outputs,
            lambda everyones: [_reduced(parts, operation) for parts in zip(*map(own, everyones), strict=True)],
        )

    # Gathering and distributing.

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        return self._collect("all_gather", inputs, outputs[0], lambda all_: [parts[0] for parts in all_])

    def all_gather_single(self, output: Tensor, input_: Tensor, options: Any = None) -> dist.Work:
        return self._collect(
            "all_gather", [input_], [output], lambda all_: [torch.cat([parts[0].flatten() for parts in all_])]
        )

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        for output, input_ in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input_, options)
        return _Done()

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> dist.Work:
        return self._collect("broadcast", tensors, tensors, lambda all_: all_[options.rootRank], options.rootRank)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any) -> dist.Work:
        found = outputs[0] if outputs else []
        return self._collect(
            "gather", inputs, found, lambda all_: [parts[0] for parts in all_] if found else [], options.rootRank
        )

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any) -> dist.Work:
        everyones = self._gather(self._note("scatter", outputs, options.rootRank), inputs[0] if inputs else [])
        _put(outputs[0], everyones[options.rootRank][self._own_rank])
        return _Done()

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None) -> dist.Work:
        return self._collect("all_to_all", inputs, outputs, lambda all_: [parts[self._own_rank] for parts in all_])

    def all_to_all_single(
        self, output: Tensor, input_: Tensor, output_sizes: Any, input_sizes: Any, options: Any = None
    ) -> dist.Work:
        outputs = output.split(output_sizes or len(output) // self._size)
        inputs = input_.split(input_sizes or len(input_) // self._size)
        return self.alltoall(outputs, inputs)

    def barrier(self, options: Any = None) -> dist.Work:
        return self._collect("barrier", [torch.zeros(1)], [], lambda all_: [])

    # Between two.

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        event = self._note("send", tensors, to)
        if event.has_values:
            self.world.exchange.send(event, tag, known_of(tensors[0]))
        return _UnderWay(lambda: self._wait(event))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        event = self._note("receive", tensors, source)

        def receive() -> None:
            self._wait(event)
            if event.has_values:
                _put(tensors[0], self.world.exchange.receive(event, tag))

        return _UnderWay(receive)

    def _wait(self, event: Event) -> None:
        self.world.events.append(replace(event, operation="wait"))


def _put(tensor: Tensor, value: Tensor | None) -> None:
    if tensor.is_meta:
        tensor.known = None if value is None else value.reshape(tensor.shape).to(tensor.dtype)  # type: ignore[attr-defined]
    else:
        assert value is not None
        with torch.no_grad():
            tensor.copy_(value.reshape(tensor.shape))


_REDUCE: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.RedOpType.SUM: lambda stack: stack.sum(0),
    dist.ReduceOp.RedOpType.AVG: lambda stack: stack.mean(0),
    dist.ReduceOp.RedOpType.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.RedOpType.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.RedOpType.PRODUCT: lambda stack: stack.prod(0),
}


def _reduced(parts: Sequence[Tensor], operation: Any) -> Tensor:
    return _REDUCE[getattr(operation, "op", operation)](torch.stack(list(parts)))
