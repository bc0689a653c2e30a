"""Decides on rank 0 when each engine receives which bucket, so that all senders and all engines are busy.

In a round every sender of a replica has one bucket, and each of the replica's engines begins with another sender:

    round 0   engine 0: a0 b0 c0    engine 1: b0 c0 a0    engine 2: c0 a0 b0
    round 1   engine 0: a1 b1 c1    ...

An engine receives one bucket at a time. It is told to receive a bucket once its sender has no earlier one to send and
all senders have passed the round before the last. So the next round's buckets are on their way to the senders, and
what an engine waits for depends on no engine that is behind. A sender has one bucket to send and at most one to come.

It also waits until its sender has room: engines that meet at a sender would share its rate and go on together, while
other senders are idle. There is room for as many engines as there are for each sender of the round.

Where engines pass weights on, these are the engines that begin a chain. One behind them is told to receive a bucket as
soon as the one before it is told to receive and pass on the same, and that one is told so once the one behind lacks no
more than `max_kept` earlier ones. Its time runs once the one before has the bucket: that one may be slow itself, or get
it late. If the one before fails, or what it passes on does not come, the engine hears so, and receives the bucket again
from the trainer, and the rest of the update, too. So a sender keeps a bucket until all have it, but goes on to the next
one when those that get it from the trainer have it, and keeps at most `max_kept` so.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dapo_mega.engines.sglang.engine_client import EngineClient, EngineError, EngineRefused
from dapo_mega.weight_sync.buckets import EncodedBucket
from dapo_mega.weight_sync.chains import before
from dapo_mega.weight_sync.mail import Message

_LAST_WORD_S = 30.0  # For an engine to answer that what it waits for does not come.


class Sender(NamedTuple):
    """A trainer's process: `place` is its number among the processes of its replica's pipeline stage."""

    replica: int
    stage: int
    place: int


@dataclass(frozen=True)
class Order:
    """What an engine is told: to receive the bucket from the engine `source` or, if that is None, from its sender, and
    to pass it on to the engine `follower`, if there is one. `name` is the bucket's within the update."""

    bucket: EncodedBucket
    name: str
    is_last: bool
    source: str | None
    follower: str | None


class _Changes:
    """Wakes up those who wait for a condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def happened(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._event.wait()


@dataclass
class _Progress:
    """Of one engine: how many buckets it was told to receive, and has. `source` and `follower` as in `Order`. `changes`
    are those of these two."""

    source: str | None
    follower: str | None = None
    num_told: int = 0
    num_received: int = 0
    is_gone: bool = False
    changes: _Changes = field(default_factory=_Changes)


class Delivery:
    """One update's calls to the engines and messages to the senders, on the event loop of the calls.

    Afterwards `num_delivered` says how many buckets engines got, `num_relayed` how many of them from engines, and
    `broken` names the engines that did not get one so, with whom they waited for.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[EncodedBucket]],
        engines: Mapping[int, Sequence[str]],
        post: Callable[[Sender, Message], None],
        tell: Callable[[EngineClient, Order], Awaitable[None]],
        timeout_s: float,
        sources: Mapping[str, str] | None = None,
        max_kept: int = 1,
        end: Callable[[str, str], None] | None = None,
    ) -> None:
        """`engines` are the URLs by replica, also of replicas whose engines have all failed. `tell` makes an engine
        receive and load a bucket, and has no limit of its own below `timeout_s`. `sources` are the engines that get
        weights from others, and these others, of the same replica; `end(engine, source)` says that the source is gone.
        `max_kept` is how many buckets senders and engines keep, besides the last one, for engines that get them from
        engines."""
        self._rounds = rounds
        self._post = post
        self._tell = tell
        self._timeout_s = timeout_s
        self._max_kept = max_kept
        self._end = end
        self.num_delivered = self.num_relayed = 0
        self.broken: list[tuple[str, str]] = []
        sources = sources or {}
        self._progress = {url: _Progress(sources.get(url)) for urls in engines.values() for url in urls}
        for url, source in sources.items():
            self._progress[source].follower = url
        self._place_of: dict[str, tuple[int, int]] = {}
        for replica, urls in engines.items():
            heads = [url for url in urls if url not in sources]
            for url in urls:
                head = [url, *before(url, sources)][-1]
                self._place_of[url] = replica, heads.index(head)
        self._missing: dict[tuple[int, Sender], set[str]] = {}
        self._received: dict[tuple[int, Sender], list[str]] = {}
        self._is_passed: dict[tuple[int, Sender], asyncio.Event] = {}
        self._num_served: Counter[tuple[int, Sender]] = Counter()
        self._num_direct = {replica: sum(url not in sources for url in urls) for replica, urls in engines.items()}
        self._rooms: defaultdict[int, _Changes] = defaultdict(_Changes)  # By replica.
        self._num_unpassed = [len(buckets) * len(engines) for buckets in rounds]
        self._is_over = [asyncio.Event() for _ in rounds]
        for number, buckets in enumerate(rounds):
            for bucket in buckets:
                for replica, urls in engines.items():
                    key = number, Sender(replica, bucket.stage, bucket.place)
                    self._missing[key] = set(urls)
                    self._received[key] = []
                    self._is_passed[key] = asyncio.Event()
        for key, missing in self._missing.items():
            if not missing:
                self._finish(key)

    @property
    def num_buckets(self) -> int:
        return sum(map(len, self._rounds))

    async def deliver(self, client: EngineClient) -> None:
        """Bring every bucket to one engine. Raises EngineError; the others go on without it."""
        replica, index = self._place_of[client.url]
        engine = self._progress[client.url]
        order = [
            (number, bucket)
            for number, buckets in enumerate(self._rounds)
            for bucket in _rotated(buckets, index % len(buckets))
        ]
        keys = [(number, Sender(replica, bucket.stage, bucket.place)) for number, bucket in order]
        try:
            for key, (_, bucket) in zip(keys, order, strict=True):
                await self._bring(client, bucket, key, is_last=engine.num_received + 1 == len(keys))
                self._received[key].append(client.url)
                engine.num_received += 1
                self.num_delivered += 1
                self._tell_neighbours(engine)
                self._leave(key, client.url)
        finally:
            try:
                if engine.num_received < len(keys):
                    self._give_up(client.url)
            finally:
                for key in keys[engine.num_received :]:
                    self._leave(key, client.url)

    async def _bring(self, client: EngineClient, bucket: EncodedBucket, key: tuple[int, Sender], is_last: bool) -> None:
        """Have the engine receive a bucket from the engine before it or, if there is none or it fails, from its
        sender."""
        engine = self._progress[client.url]
        await engine.changes.until(lambda: self._follower_is_ready(engine))
        if engine.source and await self._relay(client, bucket, key, is_last):
            return
        await self._turn(key)
        room = self._rooms[key[1].replica]
        await room.until(lambda: self._num_served[key] < self._room(key))
        self._num_served[key] += 1
        try:
            self._post(key[1], Message("send", (client.url,), key[0]))
            async with self._limit(client.url, self._timeout_s):
                await self._tell_of(client, bucket, key, is_last)
        finally:
            self._num_served[key] -= 1
            room.happened()

    def _room(self, key: tuple[int, Sender]) -> int:
        """How many engines a sender serves at a time: as many as there are now for each sender of the round."""
        number, sender = key
        return max(1, math.ceil(self._num_direct[sender.replica] / len(self._rounds[number])))

    def _tell_neighbours(self, engine: _Progress) -> None:
        """The engines before and behind may wait for what has changed of this one."""
        for url in (engine.source, engine.follower):
            if url:
                self._progress[url].changes.happened()

    def _follower_is_ready(self, engine: _Progress) -> bool:
        """Whether the engine behind lacks so few buckets that this one can keep one more for it."""
        if not engine.follower:
            return True
        return engine.num_received - self._progress[engine.follower].num_received <= self._max_kept

    async def _relay(self, client: EngineClient, bucket: EncodedBucket, key: tuple[int, Sender], is_last: bool) -> bool:
        """Have the engine receive a bucket from the engine before it. False if it does not come; then the engine gets
        it, and all others, from the trainer. Raises EngineError if the engine does not answer."""
        engine = self._progress[client.url]
        assert engine.source
        source = self._progress[engine.source]
        await engine.changes.until(lambda: source.is_gone or source.num_told > engine.num_received)
        if not source.is_gone:
            try:
                await self._wait_for_source(client.url, self._tell_of(client, bucket, key, is_last))
            except EngineRefused:
                self.broken.append((client.url, engine.source))
            else:
                self.num_relayed += 1
                return True
        self._detach(client.url)
        return False

    def _detach(self, url: str) -> None:
        """The engine gets nothing from the one before it any more."""
        engine, (replica, _) = self._progress[url], self._place_of[url]
        if engine.source:
            self._progress[engine.source].follower = None
            self._tell_neighbours(engine)
            engine.source = None
            self._num_direct[replica] += 1
            self._rooms[replica].happened()

    def _give_up(self, url: str) -> None:
        """The engine has failed: nothing goes to it, and nothing comes from it."""
        engine = self._progress[url]
        engine.is_gone = True
        self._tell_neighbours(engine)
        self._detach(url)
        self._num_direct[self._place_of[url][0]] -= 1
        if engine.follower and self._end:
            self._end(engine.follower, url)

    async def _turn(self, key: tuple[int, Sender]) -> None:
        """Wait until the sender has, or is about to have, the bucket."""
        number, sender = key
        if number > 0:
            await self._is_passed[number - 1, sender].wait()
        if number > 1:
            await self._is_over[number - 2].wait()

    async def _wait_for_source(self, url: str, call: Coroutine[Any, Any, None]) -> None:
        """Wait for the call, in which the engine receives a bucket from another one. Its time runs once that one has
        the bucket or is gone; then, if the call does not end, for one to say that the other is not to be waited for."""
        engine = self._progress[url]
        assert engine.source
        source, number = self._progress[engine.source], engine.num_received
        told = asyncio.ensure_future(call)
        came = asyncio.ensure_future(engine.changes.until(lambda: source.is_gone or source.num_received > number))
        try:
            await asyncio.wait([told, came], return_when=asyncio.FIRST_COMPLETED)
            if not source.is_gone:
                await asyncio.wait([told], timeout=self._timeout_s)
            if not told.done() and self._end:
                self._end(url, engine.source)
            async with self._limit(url, min(self._timeout_s, _LAST_WORD_S)):
                await told
        finally:
            came.cancel()
            told.cancel()

    @contextlib.asynccontextmanager
    async def _limit(self, url: str, limit_s: float) -> AsyncIterator[None]:
        """Raise EngineError if the block takes longer."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise EngineError(url, f"no answer within {self._timeout_s:g} s") from None

    async def _tell_of(
        self, client: EngineClient, bucket: EncodedBucket, key: tuple[int, Sender], is_last: bool
    ) -> None:
        engine = self._progress[client.url]
        name = f"{key[0]}-{bucket.stage}-{bucket.place}"
        engine.num_told = engine.num_received + 1
        self._tell_neighbours(engine)
        await self._tell(client, Order(bucket, name, is_last, engine.source, engine.follower))

    def _leave(self, key: tuple[int, Sender], url: str) -> None:
        """The engine has the bucket, or never will."""
        missing = self._missing[key]
        if url in missing:
            missing.remove(url)
            if missing:
                self._pass_if_possible(key)
            else:
                self._finish(key)

    def _pass_if_possible(self, key: tuple[int, Sender]) -> None:
        """Let the sender go on, if all who lack the bucket get it from engines, and it keeps few earlier ones."""
        number, sender = key
        missing = self._missing.get(key)
        keeps_enough = number >= self._max_kept and self._missing[number - self._max_kept, sender]
        if not missing or keeps_enough or self._is_passed[key].is_set():
            return
        if number > 0 and not self._is_passed[number - 1, sender].is_set():
            return
        if all(self._progress[url].source for url in missing):
            self._post(sender, Message("pass", number=number))
            self._note_passed(key)
            self._pass_if_possible((number + 1, sender))

    def _finish(self, key: tuple[int, Sender]) -> None:
        number, sender = key
        self._post(sender, Message("done", tuple(self._received[key]), number))
        self._note_passed(key)
        self._pass_if_possible((number + self._max_kept, sender))
        self._pass_if_possible((number + 1, sender))

    def _note_passed(self, key: tuple[int, Sender]) -> None:
        if self._is_passed[key].is_set():
            return
        self._is_passed[key].set()
        self._num_unpassed[key[0]] -= 1
        if self._num_unpassed[key[0]] == 0:
            self._is_over[key[0]].set()


def _rotated(buckets: Sequence[EncodedBucket], start: int) -> list[EncodedBucket]:
    return [*buckets[start:], *buckets[:start]]
