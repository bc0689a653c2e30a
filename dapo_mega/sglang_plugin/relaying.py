"""Passes weights on from engine to engine: an engine receives in a group with the engine before it what that one
receives, and sends it to the engine behind it in another group.

The first rank of an engine sends; all ranks receive. What is passed on is kept until the engine behind has it, and
nothing waits for that: the trainer tells an engine to receive a bucket only when the engine behind it has the bucket
before the last. An engine that receives from another one stops when the trainer says that this one is gone, so that it
can get the bucket from elsewhere; until then it waits, as only the trainer knows how long others may take.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.distributed.stores import connect_store, local_address
from dapo_mega.engines.sglang.weight_protocol import (
    ALL_HERE,
    PassedOn,
    failure_key,
    limit_of_group,
    meeting_key,
    presence_key,
)
from dapo_mega.sglang_plugin.joining import call_within
from dapo_mega.weight_sync.engine_groups import EngineGroup, join_group

_JOINING_LIMIT_S = 30.0
_JOINING_SHARE = 0.9  # Of the trainer's limit, so that this engine can still answer; and of that, for all to come.
_POLL_S = 0.0005
_STORE_POLL_S = 0.05
_LAST_MOMENTS_S = 0.2
_WATCHING_S = 0.2  # After the last question whether the engine before this one is there.
_PATIENCE = 5  # Of a group, in the trainer's limits: the trainer gives up earlier, for others' sake.


class RelayFailed(RuntimeError):
    """The engine before this one passes nothing on any more."""


class Relays:
    """What one rank of an engine shares with the engine before it and with the one behind it."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._follower: Follower | None = None
        self._given_up: list[Side] = []

    def join(
        self, name: str, *, address: str, port: int, rank: int, world_size: int, device: str, is_sender: bool
    ) -> None:
        """Join the relay's group `name`, as its rank 0 if `is_sender`; returns when all ranks are there. It takes the
        place of an earlier one. The group's store is the trainer's, at `address`. Raises RuntimeError or TimeoutError
        if the others do not come."""
        if earlier := self._follower if is_sender else self._source:
            self.leave(earlier.name)
        limit_s = limit_of_group(name) or _JOINING_LIMIT_S
        joining_s = min(_JOINING_LIMIT_S, _JOINING_SHARE * limit_s)

        def meet() -> tuple[dist.Store, EngineGroup]:
            store = connect_store(address, port, joining_s)
            _meet(store, name, rank, world_size, _JOINING_SHARE * joining_s)
            own, patience_s = local_address(address), _PATIENCE * limit_s
            return store, join_group(store, name, world_size, torch.device(device), own, patience_s, rank=rank)

        store, group = call_within(joining_s, meet, f"the other side of {name}")
        if is_sender:
            self._follower = Follower(name, group)
        else:
            self._source = Source(name, group, store, limit_s, is_on_gpu=device != "cpu")

    def leave(self, name: str) -> None:
        """Give up the group, if this rank is in it."""
        if self._source and self._source.name == name:
            self._give_up(self._source)
            self._source = None
        if self._follower and self._follower.name == name:
            self._give_up(self._follower)
            self._follower = None

    def source(self, name: str) -> Source | None:
        """The engine before this one, if it is in the group `name`."""
        return self._source if self._source and self._source.name == name else None

    def follower(self, order: PassedOn | None) -> Follower | None:
        """Who gets the next bucket on this rank's part: nobody without an order, and then nobody gets any more of what
        is still on its way."""
        follower = self._follower
        if follower and order and follower.name == order.group:
            follower.begin(order.bucket)
            return follower
        if follower and follower.is_open():
            self.leave(follower.name)
        return None

    def settle(self) -> None:
        """At the end of an update: free what has been passed on. An engine that has not taken it is given up, and so
        is one from which something has not come."""
        deadline = time.monotonic() + _LAST_MOMENTS_S
        while self._follower and self._follower.is_open() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._source:
            self._source.rest()
        for side in (self._source, self._follower):
            if side and side.is_open():
                self.leave(side.name)
        self._free_given_up()

    def _give_up(self, side: Side) -> None:
        self._free_given_up()
        if side.is_open():
            side.group.abort()
            self._given_up.append(side)

    def _free_given_up(self) -> None:
        # A group that is freed waits for what it still does, and gloo does not give up before its time limit.
        self._given_up = [side for side in self._given_up if side.is_open()]


class Side:
    """A group with another engine, and its broadcasts, which end in the order in which they began."""

    def __init__(self, name: str, group: EngineGroup) -> None:
        self.name = name
        self.group = group
        self.is_broken = False
        self._works: deque[dist.Work] = deque()

    def begin_broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin a broadcast of the group's first rank. Raises RuntimeError if the group is broken."""
        work = self.group.broadcast(tensor, 0)
        self._works.append(work)
        return work

    def free_ended(self) -> None:
        """Free the memory of what has ended."""
        while self._works and self._works[0].is_completed():
            try:
                self._works.popleft().wait()
            except RuntimeError:
                self.is_broken = True

    def is_open(self) -> bool:
        """Whether a broadcast has not ended."""
        self.free_ended()
        return bool(self._works)


class Source(Side):
    """The engine before this one, as a group whose broadcasts end with RelayFailed when the trainer says that it is
    gone, or does not answer for `limit_s` itself."""

    def __init__(self, name: str, group: EngineGroup, store: dist.Store, limit_s: float, *, is_on_gpu: bool) -> None:
        super().__init__(name, group)
        self.is_on_gpu = is_on_gpu
        self._store = store
        self._limit_s = limit_s
        self._heard = self._wanted = 0.0
        self._watch: threading.Thread | None = None
        self._failure: str | None = None

    def broadcast(self, tensor: Tensor, root: int) -> Arrival:
        """Receive into the tensor; the wait for it raises RuntimeError when it does not come."""
        if self._failure:
            raise RelayFailed(self._failure)
        return Arrival(self.begin_broadcast(tensor), self)

    def check(self) -> None:
        """Raise RelayFailed if the engine before this one is gone. To be called again and again during a wait."""
        self._wanted = now = time.monotonic()
        if self._watch is None or not self._watch.is_alive():
            # In a thread: a store whose machine is gone never answers.
            self._heard = now
            self._watch = threading.Thread(target=self._ask, name="watching a relay", daemon=True)
            self._watch.start()
        if self._failure is None and now - self._heard > self._limit_s:
            self._failure = f"the trainer has not answered for {self._limit_s:g} s"
        if self._failure:
            self.group.abort()  # NCCL waits for ever otherwise.
            raise RelayFailed(self._failure)

    def rest(self) -> None:
        """Nobody waits."""
        self._wanted = 0.0

    def _ask(self) -> None:
        """Ask the trainer whether the engine is gone, as long as somebody waits for it."""
        while self._failure is None and time.monotonic() - self._wanted < _WATCHING_S:
            try:
                if _is_set(self._store, failure_key(self.name)):
                    self._failure = f"the trainer says that the engine before this one is gone ({self.name})"
            except RuntimeError as error:
                self._failure = f"the trainer is gone: {error}"
            self._heard = time.monotonic()
            time.sleep(_STORE_POLL_S)


class Arrival:
    """A receipt that can fail without the group's doing; a `dist.Work` as far as it is used."""

    def __init__(self, work: dist.Work, source: Source) -> None:
        self._work = work
        self._source = source

    def wait(self) -> bool:
        """Raises RuntimeError if the bytes do not come."""
        while not self._work.is_completed():
            self._source.check()
            if self._source.is_on_gpu:  # There `wait` makes the stream wait, not this thread.
                time.sleep(_POLL_S)
            else:
                with contextlib.suppress(RuntimeError):  # It is raised below, if it is not just the time.
                    self._work.wait(timedelta(seconds=_STORE_POLL_S))
        self._source.free_ended()
        return self._work.wait()


class Follower(Side):
    """The engine behind this one. It gets each bucket's chunks in order and once, also when this engine must receive
    the bucket again."""

    def __init__(self, name: str, group: EngineGroup) -> None:
        super().__init__(name, group)
        self._bucket = ""
        self._num_passed = self._position = 0

    def begin(self, bucket: str) -> None:
        """The bucket of this name is about to be received, from its first chunk on."""
        if bucket != self._bucket:
            self._bucket, self._num_passed = bucket, 0
        self._position = 0

    def pass_on(self, chunk: Tensor) -> None:
        """Start to send the chunk, which has arrived; does not raise and does not wait."""
        self._position += 1
        self.free_ended()
        if self.is_broken or self._position <= self._num_passed:
            return
        self._num_passed = self._position
        try:
            self.begin_broadcast(chunk)
        except RuntimeError:  # The trainer hears of it from the engine behind.
            self.is_broken = True


def _meet(store: dist.Store, name: str, rank: int, world_size: int, limit_s: float) -> None:
    """Wait until all ranks are about to join the group, so that joining it takes no time. Raises RelayFailed when the
    trainer, or a rank whose limit has passed, has decided against it; whoever comes later hears the same at once."""
    store.set(presence_key(name, rank), "")
    keys = [presence_key(name, other) for other in range(world_size)]
    deadline = time.monotonic() + limit_s
    while not _is_set(store, meeting_key(name)):
        if _is_set(store, *keys):
            store.compare_set(meeting_key(name), "", ALL_HERE)
        elif time.monotonic() > deadline:
            store.compare_set(meeting_key(name), "", f"not all ranks of {name} came within {limit_s:g} s")
        else:
            time.sleep(_STORE_POLL_S)
    if (decision := store.get(meeting_key(name)).decode()) != ALL_HERE:
        raise RelayFailed(decision)


def _is_set(store: dist.Store, *keys: str) -> bool:
    answer: Any = store.check(list(keys))
    return bool(answer)
