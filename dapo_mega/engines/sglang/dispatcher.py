"""Sends requests to the engines of a fleet and gives each request exactly one answer.

::

    submit -> waiting -> call on an engine -> Response
                 ^             |
                 +-------------+      the call failed, the engine left, or its weights are being replaced
                               +----> GenerationFailure, after `max_attempts` failed calls

Everything happens on one event loop. Only calls in flight are tasks; waiting requests are entries of a queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dapo_mega.engines.sglang.api import (
    Completion,
    MalformedAnswer,
    generate_payload,
    joined,
    parse_answer,
    unfit,
)
from dapo_mega.engines.sglang.engine_client import (
    EngineClient,
    EngineDisconnected,
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)
from dapo_mega.engines.sglang.prefix_routing import EngineRouter, EngineSlot, EngineSnapshot
from dapo_mega.engines.sglang.request_counters import Cause, RequestCounters
from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion
from dapo_mega.types import Answer, GenerationFailure, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Request:
    """A request until it has its answer. `parts` is what calls that were ended early have generated."""

    request: GenerationRequest
    prompt: bytes
    parts: list[Completion] = field(default_factory=list)
    num_calls: int = 0
    num_failures: int = 0
    avoided_url: str = ""
    flight: _Attempt | None = None
    retry: asyncio.TimerHandle | None = None

    @property
    def id(self) -> int:
        return self.request.request_id

    def oldest_version(self, current: int) -> int:
        """Of the weights that have a part in it; `current` are those of a call that begins now."""
        under_way = self.flight.version if self.flight else current
        return min([under_way, *(version for part in self.parts for version, _ in part.version_spans)])


@dataclass(eq=False)
class _Attempt:
    """One call of an engine for a request. `version` is that of the engine's weights when it began."""

    rid: str
    work: _Request
    slot: EngineSlot
    version: int
    started: float
    task: asyncio.Task[None] | None = None


class Dispatcher:
    """Owns all requests between `submit` and their answer. Made and used on one running event loop."""

    def __init__(
        self,
        *,
        vocab_size: int,
        requests_per_engine: int,
        request_timeout_s: float,
        max_attempts: int,
        on_answer: Callable[[Answer], None],
        on_trouble: Callable[[str], None] | None = None,
        on_wrong_weights: Callable[[str, WeightVersion | None], None] | None = None,
        run: str = "",
        backoff_s: float = 0.5,
        seed: int = 0,
    ) -> None:
        """`on_answer` gets every answer as it comes, `on_trouble` the URL of an engine whose connection failed,
        `on_wrong_weights` that of one which answered with other weights than it was given, with these weights where
        they are another run's; `run` is the name that this one's go by.

        A call takes at most `request_timeout_s`. After a failed one its request waits `backoff_s`, twice as long each
        time and spread by `seed`, and goes to another engine where there is one.
        """
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._on_answer = on_answer
        self._on_trouble = on_trouble
        self._on_wrong_weights = on_wrong_weights
        self._backoff_s = backoff_s
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._own_run = run
        self._call_prefix = os.urandom(4).hex()
        self._router = EngineRouter(requests_per_engine)
        self._slots: dict[str, EngineSlot] = {}
        self._newest_version = -1
        self._works: dict[int, _Request] = {}
        self._waiting: OrderedDict[int, _Request] = OrderedDict()
        self._flights: dict[str, _Attempt] = {}
        self._is_held = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Task[None]] = set()
        self.counters = RequestCounters()

    # ---- engines ----

    def add_engine(self, client: EngineClient, version: int) -> None:
        """Use an engine that holds these weights."""
        assert client.url not in self._slots
        self._slots[client.url] = EngineSlot(client, version)
        self._newest_version = max(self._newest_version, version)
        self._start_calls()

    def set_version(self, url: str, version: int) -> None:
        """The engine holds these weights now; to be said before it generates with them."""
        self._slots[url].version = version
        self._newest_version = max(self._newest_version, version)

    def remove_engine(self, url: str, reason: str) -> None:
        """Use the engine no more; its requests go to others at once."""
        slot = self._slots.pop(url)
        flights = [flight for flight in self._flights.values() if flight.slot is slot]
        for flight in reversed(flights):
            self._close_attempt(flight)
            self.counters.moved()
            self._wait_first(flight.work)
        if flights:
            logger.info("%d requests move away from %s: %s", len(flights), url, reason)
            self._start_background(slot.client.abort(all=True))
        self._start_calls()

    def engines(self) -> list[EngineSnapshot]:
        return [slot.snapshot() for slot in self._slots.values()]

    # ---- requests ----

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests on; those that an engine must not see are answered with a failure right away."""
        for request in requests:
            self.counters.submit(request.request_id)
            work = _Request(request, hashlib.blake2b(request.prompt_token_ids.tobytes(), digest_size=16).digest())
            self._works[work.id] = work
            self._router.enter(work.prompt)
            if reason := unfit(request, self._vocab_size):
                self._fail(work, f"the request was not sent: {reason}")
            else:
                self._waiting[work.id] = work
        self._start_calls()

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Give up requests; those that have ended already are left alone."""
        for request_id in request_ids:
            if work := self._works.get(request_id):
                if work.flight:
                    self._abandon(work.flight)
                self._forget(work)
                self.counters.close(request_id, "cancelled")
        self._start_calls()

    def oldest_versions(self, request_ids: Iterable[int]) -> dict[int, int]:
        """The oldest weights that have a part in each request, by id; see `RolloutEngine`."""
        works = [work for request_id in request_ids if (work := self._works.get(request_id))]
        return {work.id: work.oldest_version(self._newest_version) for work in works}

    def hold(self) -> None:
        """Start no calls until `resume`. What an engine aborts meanwhile is kept and goes on afterwards."""
        self._is_held = True

    def resume(self) -> None:
        self._is_held = False
        self._start_calls()

    async def drain(self) -> None:
        """Wait until no call is in flight; to be used after `hold`."""
        assert self._is_held
        await self._idle.wait()

    async def reclaim(self, grace_s: float = 10.0) -> None:
        """Wait for what engines return that were told to abort everything; to be used after `hold`.

        A call that had not begun on its engine does not return; it is given up after `grace_s` and made again later.
        """
        try:
            async with asyncio.timeout(grace_s):
                await self.drain()
        except TimeoutError:
            for flight in reversed(list(self._flights.values())):
                self._abandon(flight)
                self.counters.taken_back()
                self._wait_first(flight.work)

    def pop_metrics(self) -> dict[str, float]:
        """The counters since the last call, and what is in flight and waiting now."""
        return {
            **self.counters.pop_metrics(),
            "rollout/requests_in_flight": float(len(self._flights)),
            "rollout/requests_waiting": float(self.counters.num_open - len(self._flights)),
        }

    async def close(self) -> None:
        """Drop everything; open requests get no answer."""
        self._is_held = True
        for work in self._works.values():
            if work.retry:
                work.retry.cancel()
        tasks = [*self._background, *(flight.task for flight in self._flights.values() if flight.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- starting calls ----

    def _start_calls(self) -> None:
        while not self._is_held and (chosen := self._next_flight()):
            self._start_call(*chosen)

    def _next_flight(self) -> tuple[_Request, EngineSlot] | None:
        """The first request in the queue for which there is an engine, with that engine."""
        now = self._loop.time()
        free = [slot for slot in self._slots.values() if self._router.has_room(slot, now)]
        if free:
            for work in self._waiting.values():
                # Of several engines a request does not try the one again that failed it last.
                allowed = free if len(self._slots) == 1 else [slot for slot in free if slot.url != work.avoided_url]
                if slot := self._router.choose(allowed, work.prompt):
                    return work, slot
        return None

    def _start_call(self, work: _Request, slot: EngineSlot) -> None:
        del self._waiting[work.id]
        self._router.settle(work.prompt, slot)
        work.num_calls += 1
        # Engines abort every call whose name starts with the one given: the dot ends it.
        rid = f"{self._call_prefix}-{work.id}-{work.num_calls}."
        flight = _Attempt(rid, work, slot, slot.version, self._loop.time())
        self._flights[rid] = work.flight = flight
        slot.in_flight += 1
        self._idle.clear()
        flight.task = self._loop.create_task(self._run(flight))
        flight.task.add_done_callback(lambda task: self._end_with_fault(flight, task))

    # ---- ending calls ----

    async def _run(self, flight: _Attempt) -> None:
        """The request has its answer, or waits for another call, when this returns."""
        work, slot = flight.work, flight.slot
        payload = generate_payload(work.request, work.parts, flight.rid)
        try:
            body = await slot.client.generate(payload, self._request_timeout_s)
            versions = VersionRange(self._own_run, flight.version, self._newest_version)
            completion = parse_answer(body, work.request, work.parts, self._vocab_size, versions, slot.url)
        except (EngineError, MalformedAnswer) as error:
            self._failed(flight, error)
        else:
            self._close_attempt(flight)
            self._accept(flight, completion)
        self._start_calls()

    def _accept(self, flight: _Attempt, completion: Completion) -> None:
        """Answer the request, or keep what was generated when the call was ended early."""
        work = flight.work
        if len(completion.token_ids):
            work.parts.append(completion)
        if completion.finish != "abort":
            flight.slot.succeeded(len(completion.token_ids), self._loop.time() - flight.started)
            self._end(work, "answered", joined(work.id, work.parts))
        elif self._is_held:
            self.counters.taken_back()
            self._wait_first(work)
        else:
            work.avoided_url = flight.slot.url
            self._retry(work, "aborted", f"{flight.slot.url}: the engine aborted it")

    def _failed(self, flight: _Attempt, error: EngineError | MalformedAnswer) -> None:
        """The call has no usable answer."""
        work, slot = flight.work, flight.slot
        is_unreachable = isinstance(error, EngineUnreachable)
        if pause := slot.failed(self._loop.time(), self._backoff_s, is_unreachable):
            self._loop.call_later(pause, self._start_calls)
        if self._on_trouble and isinstance(error, EngineUnreachable | EngineDisconnected):
            self._on_trouble(slot.url)
        self._close_attempt(flight)
        work.avoided_url = slot.url
        if is_unreachable:  # Nothing was sent, so the request has no part in it.
            self.counters.call_failed("unreachable")
            self._wait_first(work)
        elif isinstance(error, MalformedAnswer):
            self._retry(work, error.fault, f"{slot.url}: unusable answer: {error}")
        else:
            self._retry(work, _cause(error), str(error))
        if isinstance(error, EngineTimeout):
            self._start_background(slot.client.abort(flight.rid))
        if not isinstance(error, MalformedAnswer) or error.fault != "version":
            return
        if self._on_wrong_weights and slot.url in self._slots:
            self._on_wrong_weights(slot.url, error.foreign)

    def _retry(self, work: _Request, cause: Cause, reason: str) -> None:
        """Call again after a while, or give the request its failure when that was the last attempt."""
        self.counters.call_failed(cause)
        work.num_failures += 1
        if work.num_failures >= self._max_attempts:
            self._fail(work, f"{work.num_failures} attempts failed, lastly {reason}")
            return
        delay = self._backoff_s * 2.0 ** (work.num_failures - 1) * self._random.uniform(0.5, 1.5)
        work.retry = self._loop.call_later(delay, self._try_again, work)

    def _try_again(self, work: _Request) -> None:
        work.retry = None
        self._wait_first(work)
        self._start_calls()

    def _close_attempt(self, flight: _Attempt) -> None:
        """Take a flight off the account, and hang up unless the call itself does it."""
        del self._flights[flight.rid]
        flight.slot.in_flight -= 1
        flight.work.flight = None
        if not self._flights:
            self._idle.set()
        if flight.task and flight.task is not asyncio.current_task(self._loop):
            flight.task.cancel()

    def _abandon(self, flight: _Attempt) -> None:
        """End a flight early on an engine that stays in use."""
        self._close_attempt(flight)
        self._start_background(flight.slot.client.abort(flight.rid))

    def _end_with_fault(self, flight: _Attempt, task: asyncio.Task[None]) -> None:
        """A call that ended with a fault of the program must not leave its request waiting for ever."""
        if task.cancelled() or not (fault := task.exception()):
            return
        logger.critical("a call of %s failed: %r", flight.slot.url, fault, exc_info=fault)
        if flight.rid in self._flights:
            self._close_attempt(flight)
            self._fail(flight.work, f"a fault of the program: {fault!r}")

    # ---- ending requests ----

    def _fail(self, work: _Request, reason: str) -> None:
        self._end(work, "failed", GenerationFailure(work.id, reason))

    def _end(self, work: _Request, end: Literal["answered", "failed"], answer: Answer) -> None:
        self._forget(work)
        self.counters.close(work.id, end)
        self._on_answer(answer)

    def _forget(self, work: _Request) -> None:
        del self._works[work.id]
        self._waiting.pop(work.id, None)
        self._router.leave(work.prompt)
        if work.retry:
            work.retry.cancel()

    def _wait_first(self, work: _Request) -> None:
        """Back to the head of the queue: it has waited already."""
        self._waiting[work.id] = work
        self._waiting.move_to_end(work.id, last=False)

    def _start_background(self, call: Coroutine[Any, Any, None]) -> None:
        """Begin a call whose failure does not matter."""
        task = self._loop.create_task(_attempt(call))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _attempt(call: Coroutine[Any, Any, None]) -> None:
    try:
        await call
    except EngineError as error:
        logger.debug("%s", error)


def _cause(error: EngineError) -> Cause:
    match error:
        case EngineTimeout():
            return "timeout"
        case EngineDisconnected():
            return "disconnected"
        case EngineRefused():
            return "refused"
    return "malformed"
