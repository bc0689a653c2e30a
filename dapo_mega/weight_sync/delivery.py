"""Decides on rank 0 when each engine receives which bucket, so that all senders and all engines are busy.

In a round every sender of a replica has one bucket, and each of the replica's engines begins with another sender:

    round 0   engine 0: a0 b0 c0    engine 1: b0 c0 a0    engine 2: c0 a0 b0
    round 1   engine 0: a1 b1 c1    ...

An engine receives one bucket at a time. It is told to receive a bucket once its sender has no earlier one to send and
all senders have passed the round before the last. So the next round's buckets are on their way to the senders, and
what an engine waits for depends on no engine that is behind. A sender has one bucket to send and at most one to come.

It also waits until its sender has room: engines that meet at a sender would share its rate and go on together, while
other senders are idle. There is room for as many engines as there are for each sender of the round.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError
from dapo_mega.weight_sync.buckets import EncodedBucket
from dapo_mega.weight_sync.mail import Message


class Sender(NamedTuple):
    """A trainer's process: `place` is its number among the processes of its replica's pipeline stage."""

    replica: int
    stage: int
    place: int


class Delivery:
    """One update's calls to the engines and messages to the senders, on the event loop of the calls."""

    def __init__(
        self,
        rounds: Sequence[Sequence[EncodedBucket]],
        engines: Mapping[int, Sequence[str]],
        post: Callable[[Sender, Message], None],
        tell: Callable[[EngineClient, EncodedBucket, bool], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        """`engines` are the URLs by replica, also of replicas whose engines have all failed. `tell(engine, bucket,
        is_last)` makes an engine receive and load a bucket, and has no limit of its own below `timeout_s`."""
        self._rounds = rounds
        self._post = post
        self._tell = tell
        self._timeout_s = timeout_s
        self._place_of = {url: (replica, i) for replica, urls in engines.items() for i, url in enumerate(urls)}
        self._num_engines = {replica: len(urls) for replica, urls in engines.items()}
        self._num_served: Counter[tuple[int, Sender]] = Counter()
        self._has_room: dict[int, asyncio.Event] = {replica: asyncio.Event() for replica in engines}
        self._missing: dict[tuple[int, Sender], set[str]] = {}
        self._received: dict[tuple[int, Sender], list[str]] = {}
        self._is_done: dict[tuple[int, Sender], asyncio.Event] = {}
        self._num_not_done = [len(buckets) * len(engines) for buckets in rounds]
        self._is_over = [asyncio.Event() for _ in rounds]
        for number, buckets in enumerate(rounds):
            for bucket in buckets:
                for replica, urls in engines.items():
                    key = number, Sender(replica, bucket.stage, bucket.place)
                    self._missing[key] = set(urls)
                    self._received[key] = []
                    self._is_done[key] = asyncio.Event()
        for key, missing in self._missing.items():
            if not missing:
                self._finish(key)

    @property
    def num_buckets(self) -> int:
        return sum(map(len, self._rounds))

    async def deliver(self, client: EngineClient) -> None:
        """Bring every bucket to one engine. Raises EngineError; the others go on without it."""
        replica, index = self._place_of[client.url]
        order = [
            (number, bucket)
            for number, buckets in enumerate(self._rounds)
            for bucket in _rotated(buckets, index % len(buckets))
        ]
        keys = [(number, Sender(replica, bucket.stage, bucket.place)) for number, bucket in order]
        num_received = 0
        try:
            for key, (_, bucket) in zip(keys, order, strict=True):
                await self._bring(client, bucket, key, is_last=num_received + 1 == len(keys))
                self._received[key].append(client.url)
                num_received += 1
                self._leave(key, client.url)
        finally:
            self._num_engines[replica] -= num_received < len(keys)
            for key in keys[num_received:]:
                self._leave(key, client.url)

    async def _bring(self, client: EngineClient, bucket: EncodedBucket, key: tuple[int, Sender], is_last: bool) -> None:
        """Have the engine receive the bucket from its sender, once that has it and room."""
        number, sender = key
        if number > 0:
            await self._is_done[number - 1, sender].wait()
        if number > 1:
            await self._is_over[number - 2].wait()
        room = self._has_room[sender.replica]
        while self._num_served[key] >= max(1, math.ceil(self._num_engines[sender.replica] / len(self._rounds[number]))):
            room.clear()
            await room.wait()
        self._num_served[key] += 1
        try:
            self._post(sender, Message("send", (client.url,), number))
            async with asyncio.timeout(self._timeout_s):
                await self._tell(client, bucket, is_last)
        except TimeoutError:
            raise EngineError(client.url, f"no answer within {self._timeout_s:g} s") from None
        finally:
            self._num_served[key] -= 1
            room.set()

    def _leave(self, key: tuple[int, Sender], url: str) -> None:
        """The engine has the bucket, or never will."""
        missing = self._missing[key]
        if url in missing:
            missing.remove(url)
            if not missing:
                self._finish(key)

    def _finish(self, key: tuple[int, Sender]) -> None:
        number, sender = key
        self._post(sender, Message("done", tuple(self._received[key]), number))
        self._is_done[key].set()
        self._num_not_done[number] -= 1
        if self._num_not_done[number] == 0:
            self._is_over[number].set()


def _rotated(buckets: Sequence[EncodedBucket], start: int) -> list[EncodedBucket]:
    return [*buckets[start:], *buckets[:start]]
