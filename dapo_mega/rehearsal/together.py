"""Rehearses several ranks at the same time, each in a process of its own that others can speak to."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import types
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from dapo_mega.errors import InputError
from dapo_mega.rehearsal.communication import Event, Exchange
from dapo_mega.rehearsal.places import place
from dapo_mega.rehearsal.roles import Roles

T = TypeVar("T")
_SILENCE_S = 600
_NEVER_EMPTIED = frozenset(
    # The last one's referents, of Python 3.12's asyncio, are also futures that it has freed, and would free again.
    (tuple, frozenset, type, types.FunctionType, types.BuiltinFunctionType, types.GenericAlias, types.ModuleType)
)


class Stuck(InputError):
    """Ranks wait for each other, or meet in different operations, or one of them fails."""


@dataclass(frozen=True)
class _Request:
    """What a rank asks of the others; `key` tells which of its requests belong together."""

    kind: str
    event: Event | None = None
    key: Any = None
    value: Any = None


class _Line(Exchange):
    """A rank's way to the others, through the process that has started them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def gather(self, event: Event, number: int, value: Any) -> list[Any]:
        return self._ask(_Request("gather", event, (event.group, number), value))

    def send(self, event: Event, tag: int, value: Any) -> None:
        self.tell(_Request("send", event, (event.group, tag), value))

    def receive(self, event: Event, tag: int) -> Any:
        return self._ask(_Request("receive", event, (event.group, tag)))

    def tell(self, request: _Request) -> None:
        self._connection.send_bytes(pickle.dumps(request))

    def _ask(self, request: _Request) -> Any:
        self.tell(request)
        try:
            return pickle.loads(self._connection.recv_bytes())
        except EOFError:
            os._exit(1)


@dataclass
class _Switchboard(Generic[T]):
    """Passes on what ranks give each other."""

    roles: Roles
    connections: dict[int, Connection]
    processes: dict[int, multiprocessing.context.ForkProcess]
    results: dict[int, T] = field(default_factory=dict)
    waiting: dict[int, _Request] = field(default_factory=dict)
    _gathered: dict[Any, dict[int, _Request]] = field(default_factory=lambda: defaultdict(dict))
    _sent: dict[Any, deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def run(self) -> dict[int, T]:
        while len(self.results) < len(self.connections):
            running = {c: rank for rank, c in self.connections.items() if rank not in self.results}
            if not any(rank not in self.waiting for rank in running.values()):
                raise Stuck(self._who_waits())
            if not (ready := wait(list(running), _SILENCE_S)):
                raise RuntimeError(f"no rehearsed rank has done anything for {_SILENCE_S} s: {self._who_waits()}")
            for connection in ready:
                rank = running[connection]  # type: ignore[index]
                try:
                    request = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    process = self.processes[rank]
                    process.join()
                    ended = f"has died with status {process.exitcode}"
                    raise RuntimeError(f"the process of {self.roles.describe(rank)} {ended}") from None
                self._take(rank, request)
        return self.results

    def _take(self, rank: int, request: _Request) -> None:
        match request.kind:
            case "done":
                self.results[rank] = request.value
            case "failed":
                if isinstance(request.value, InputError):
                    raise request.value
                waiting = f"; {self._who_waits()}" if self.waiting else ""
                raise Stuck(f"{self.roles.describe(rank)} failed: {request.value}{waiting}")
            case "gather":
                self.waiting[rank] = request
                self._gathered[request.key][rank] = request
                self._complete(request.key)
            case "send":
                assert request.event
                self._sent[request.key, rank, request.event.peer].append(request.value)
                to = request.event.peer
                if to in self.waiting and self.waiting[to].kind == "receive":
                    self._deliver(to)
            case "receive":
                self.waiting[rank] = request
                self._deliver(rank)

    def _complete(self, key: Any) -> None:
        members = key[0].ranks
        given = self._gathered[key]
        if len(given) < len(self.roles.within(members)):
            return
        operations = {request.event.operation for request in given.values() if request.event}
        if len(operations) > 1:
            raise Stuck(self._who_waits())
        values = [given[self.roles.stand_in(member, members)].value for member in members]
        for rank in self._gathered.pop(key):
            self._answer(rank, values)

    def _deliver(self, to: int) -> None:
        request = self.waiting[to]
        assert request.event
        source = request.event.peer
        assert source is not None
        if source not in self.connections and not request.event.is_host:
            self._answer(to, None)
        elif given := self._sent[request.key, source, to]:
            self._answer(to, given.popleft())

    def _answer(self, rank: int, value: Any) -> None:
        del self.waiting[rank]
        self.connections[rank].send_bytes(pickle.dumps(value))

    def _who_waits(self) -> str:
        lines = [
            f"{self.roles.describe(rank)} waits in {request.event.describe()}"
            for rank, request in sorted(self.waiting.items())
            if request.event
        ]
        ended = [self.roles.describe(rank) for rank in self.results]
        return "ranks wait for each other: " + "; ".join(lines + [f"{rank} has ended" for rank in ended])


def together(roles: Roles, work: Callable[[int, Exchange], T]) -> dict[int, T]:
    """What `work(rank, exchange)` returns for each rank that is rehearsed. Raises the first error of any of them, and
    Stuck if they wait for each other."""
    context = multiprocessing.get_context("fork")
    connections: dict[int, Connection] = {}
    processes: dict[int, multiprocessing.context.ForkProcess] = {}
    gc.unfreeze()  # What is frozen is in no list of objects.
    # In no rehearsed rank may a group of this process end: its threads are not there. Megatron remembers some where
    # nothing else knows them, such as in the cache of a method. So all that is there is kept, and what may be taken out
    # of it.
    objects = gc.get_objects()
    kept = [objects, gc.get_referents(*(each for each in objects if type(each) not in _NEVER_EMPTIED))]
    gc.freeze()
    try:
        for rank in roles.rehearsed:
            here, there = context.Pipe()
            process = context.Process(
                target=_play, args=(work, rank, there, [here, *connections.values()]), daemon=True
            )
            process.start()
            there.close()
            connections[rank] = here
            processes[rank] = process
        return _Switchboard[T](roles, connections, processes).run()
    finally:
        for connection in connections.values():
            connection.close()
        for process in processes.values():
            process.kill()  # It has ended, unless another one has failed.
            process.join()
        # Not before: as long as a fork lives, each page that this touches is copied.
        kept.clear()
        gc.unfreeze()


def _play(
    work: Callable[[int, Exchange], Any], rank: int, connection: Connection, others: Sequence[Connection]
) -> None:
    for other in others:
        other.close()
    line = _Line(connection)
    try:
        line.tell(_Request("done", value=work(rank, line)))
    except BaseException as error:  # Whatever it is, the process that started this one has to know.
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        text = f"{type(error).__name__}: {error}, at {place(trace.tb_frame if trace else None)}"
        with contextlib.suppress(OSError):  # Another rank has failed before.
            line.tell(_Request("failed", value=error if isinstance(error, InputError) else text))
    os._exit(0)
