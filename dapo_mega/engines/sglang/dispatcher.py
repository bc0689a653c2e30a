"""Sends requests to the engines of a fleet and gives each request exactly one answer.

::

    generate -> waiting -> call on an engine -> Response
                   ^             |
                   +-------------+      the call failed, the engine left, or its weights are being replaced
                                 +----> GenerationFailure, after `max_attempts` failed calls

Everything runs on one event loop. Only calls in attempt are tasks; waiting requests are entries of a queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from dapo_mega.engines.protocol import Generation
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
from dapo_mega.engines.sglang.engine_load import EngineLoad, load_metrics
from dapo_mega.engines.sglang.prefix_routing import EngineRouter, EngineSlot, EngineSnapshot
from dapo_mega.engines.sglang.request_counters import Cause, RequestCounters
from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion
from dapo_mega.metrics.timeline import Load, LoadHistory
from dapo_mega.metrics.timeline.load import segments_each
from dapo_mega.types import Answer, GenerationFailure, GenerationRequest

logger = logging.getLogger(__name__)

_WITHDRAWAL_S = 10.0


class _Request(Generation):
    """A request until it has its answer. `parts` are the partial outputs of its aborted calls."""

    def __init__(self, request: GenerationRequest, dispatcher: Dispatcher) -> None:
        super().__init__(request, asyncio.get_running_loop())
        self._dispatcher = dispatcher
        self.id = request.request_id
        self.prompt = hashlib.blake2b(request.prompt_token_ids.tobytes(), digest_size=16).digest()
        self.parts: list[Completion] = []
        self.num_calls = self.num_failures = 0
        self.avoided_url = ""
        self.attempt: _Attempt | None = None
        self.retry: asyncio.TimerHandle | None = None

    def oldest_version(self) -> int:
        """See `Generation`."""
        under_way = self.attempt.version if self.attempt else self._dispatcher.newest_version
        return min([under_way, *(version for part in self.parts for version, _ in part.version_spans)])

    def cancel(self, msg: object = None) -> bool:
        """See asyncio."""
        if not super().cancel(msg):
            return False
        self._dispatcher.give_up(self)
        return True


@dataclass(eq=False)
class _Attempt:
    """One call of an engine for a request. `version` is the engine's weight version when the call began."""

    rid: str
    work: _Request
    slot: EngineSlot
    version: int
    task: asyncio.Task[None] | None = None


class Dispatcher:
    """Owns all requests between `generate` and their answer. Made and used on one running event loop."""

    def __init__(
        self,
        *,
        vocab_size: int,
        requests_per_engine: int,
        request_timeout_s: float,
        max_attempts: int,
        on_trouble: Callable[[str], None] | None = None,
        on_wrong_weights: Callable[[str, WeightVersion | None], None] | None = None,
        run: str = "",
        backoff_s: float = 0.5,
        seed: int = 0,
    ) -> None:
        """`run` is the name of this run's weights. Callbacks: `on_trouble(url)` when a connection fails;
        `on_wrong_weights(url, weights)` when an engine answers with weights that it was not given, where `weights` is
        None unless they are another run's.

        A call takes at most `request_timeout_s`. After a failed call its request waits `backoff_s`, doubled each time
        and with jitter from `seed`, and then goes to another engine if there is one.
        """
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._on_trouble = on_trouble
        self._on_wrong_weights = on_wrong_weights
        self._backoff_s = backoff_s
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._own_run = run
        self._call_prefix = os.urandom(4).hex()
        self._router = EngineRouter(requests_per_engine)
        self._slots: dict[str, EngineSlot] = {}
        self._histories: dict[str, LoadHistory] = {}
        self.newest_version = -1
        self._works: set[_Request] = set()
        self._waiting: OrderedDict[int, _Request] = OrderedDict()
        self._attempts: dict[str, _Attempt] = {}
        self._is_held = self._is_starting = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._background: set[asyncio.Task[None]] = set()
        self.counters = RequestCounters()

    # ---- engines ----

    def add_engine(self, client: EngineClient, version: int) -> None:
        """Send requests to this engine, which holds weights of this version."""
        assert client.url not in self._slots
        now = self._loop.time()
        history = self._histories.setdefault(client.url, LoadHistory(now))
        self._slots[client.url] = EngineSlot(client, version, EngineLoad(now), history)
        self.newest_version = max(self.newest_version, version)
        self._start_calls()

    def set_version(self, url: str, version: int) -> None:
        """Record the version of the engine's new weights; call before it generates with them."""
        self._slots[url].version = version
        self.newest_version = max(self.newest_version, version)

    def remove_engine(self, url: str, reason: str) -> None:
        """Stop using the engine; its requests go to other engines at once."""
        slot = self._slots.pop(url)
        attempts = [attempt for attempt in self._attempts.values() if attempt.slot is slot]
        for attempt in reversed(attempts):
            self._close_attempt(attempt)
            self.counters.moved()
            self._wait_first(attempt.work)
        if attempts:
            logger.debug("%d requests move away from %s: %s", len(attempts), url, reason)
            self._start_background(slot.client.abort(all=True))
        self._start_calls()

    def withdraw_engine(self, url: str) -> None:
        """Send nothing more to an engine that stays up. Its calls are ended early and go on elsewhere after what they
        have generated; one that does not return within `_WITHDRAWAL_S` is sent again."""
        slot = self._slots.pop(url)
        for attempt in self._attempts.values():
            if attempt.slot is slot:
                self._start_background(slot.client.abort(attempt.rid))
        self._loop.call_later(_WITHDRAWAL_S, self._take_back, slot)
        self._start_calls()

    def engines(self) -> list[EngineSnapshot]:
        return [slot.snapshot() for slot in self._slots.values()]

    # ---- requests ----

    def generate(self, request: GenerationRequest) -> Generation:
        """Queue the request. One that must not be sent to an engine has its failure at once."""
        self.counters.submit(request.request_id)
        work = _Request(request, self)
        self._works.add(work)
        self._router.enter(work.prompt)
        if reason := unfit(request, self._vocab_size):
            self._fail(work, f"the request was not sent: {reason}")
        else:
            self._waiting[work.id] = work
            self._start_calls()
        return work

    def give_up(self, work: _Request) -> None:
        """End a request that was cancelled."""
        if work.attempt:
            self._abandon(work.attempt)
        self._forget(work)
        self.counters.close(work.id, "cancelled")
        self._start_calls()

    def fail_all(self, reason: str) -> None:
        """End all requests."""
        for work in list(self._works):
            if work.attempt:
                self._close_attempt(work.attempt)
            self._fail(work, reason)

    def hold(self) -> None:
        """Start no calls until `resume`. Outputs that engines abort meanwhile are kept and continued afterwards."""
        self._is_held = True

    def resume(self) -> None:
        self._is_held = False
        self._start_calls()

    async def drain(self) -> None:
        """Wait until no call is in attempt. Call after `hold`."""
        assert self._is_held
        await self._idle.wait()

    async def reclaim(self, grace_s: float = 10.0) -> None:
        """Wait for the partial outputs of aborted calls. Call after `hold`.

        An aborted call that had not begun on its engine does not return: it is dropped after `grace_s` and sent again
        later.
        """
        try:
            async with asyncio.timeout(grace_s):
                await self.drain()
        except TimeoutError:
            self._take_back()

    def pop_metrics(self) -> dict[str, float]:
        """The counters and the engines' load since the last call, and the requests in attempt and waiting now."""
        return {
            **self.counters.pop_metrics(),
            **load_metrics((slot.load for slot in self._slots.values()), self._loop.time()),
            "rollout/requests_in_flight": float(len(self._attempts)),
            "rollout/requests_waiting": float(self.counters.num_open - len(self._attempts)),
        }

    def pop_loads(self) -> dict[str, list[Load]]:
        """The calls in flight over time since the last call, of each engine that was in use meanwhile."""
        now = self._loop.time()
        num_segments = segments_each(len(self._histories))
        found = {url: history.pop(now, num_segments) for url, history in self._histories.items()}
        self._histories = {url: h for url, h in self._histories.items() if url in self._slots or h.num_open}
        return found

    async def close(self) -> None:
        """Cancel all requests, without a word to the engines."""
        self._is_held = True
        attempts = list(self._attempts.values())
        tasks = [*self._background, *(attempt.task for attempt in attempts if attempt.task)]
        for attempt in attempts:
            self._close_attempt(attempt)
        for task in self._background:
            task.cancel()
        for work in list(self._works):
            work.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- starting calls ----

    def _start_calls(self) -> None:
        """Start what can be started, once all has happened that is happening now."""
        if not self._is_starting:
            self._is_starting = True
            self._loop.call_soon(self._start_all)

    def _start_all(self) -> None:
        self._is_starting = False
        while not self._is_held and (chosen := self._next_attempt()):
            self._start_call(*chosen)

    def _next_attempt(self) -> tuple[_Request, EngineSlot] | None:
        """The first waiting request that an engine has room for, with that engine."""
        now = self._loop.time()
        free = [slot for slot in self._slots.values() if self._router.has_room(slot, now)]
        if free:
            for work in self._waiting.values():
                # With several engines, a request avoids the engine that failed it last.
                allowed = free if len(self._slots) == 1 else [slot for slot in free if slot.url != work.avoided_url]
                if slot := self._router.choose(allowed, work.prompt):
                    return work, slot
        return None

    def _start_call(self, work: _Request, slot: EngineSlot) -> None:
        del self._waiting[work.id]
        self._router.assign(work.prompt, slot)
        work.num_calls += 1
        # Engines abort every call whose rid has the given prefix: the dot ends the prefix.
        rid = f"{self._call_prefix}-{work.id}-{work.num_calls}."
        attempt = _Attempt(rid, work, slot, slot.version)
        self._attempts[rid] = work.attempt = attempt
        slot.change_calls(1, self._loop.time())
        self._idle.clear()
        attempt.task = self._loop.create_task(self._run(attempt))
        attempt.task.add_done_callback(lambda task: self._end_with_fault(attempt, task))

    # ---- ending calls ----

    async def _run(self, attempt: _Attempt) -> None:
        """Make the call; afterwards the request has its answer or waits for another call."""
        work, slot = attempt.work, attempt.slot
        payload = generate_payload(work.request, work.parts, attempt.rid)
        try:
            body = await slot.client.generate(payload, self._request_timeout_s)
            versions = VersionRange(self._own_run, attempt.version, self.newest_version)
            outcome: Completion | EngineError | MalformedAnswer = parse_answer(
                body, work.request, work.parts, self._vocab_size, versions, slot.url
            )
        except (EngineError, MalformedAnswer) as error:
            outcome = error
        if attempt.rid not in self._attempts:
            return  # It was closed, and what cancels it came as its time ran out.
        if isinstance(outcome, Completion):
            self._close_attempt(attempt)
            self._accept(attempt, outcome)
        else:
            self._failed(attempt, outcome)
        self._start_calls()

    def _accept(self, attempt: _Attempt, completion: Completion) -> None:
        """Answer the request, or keep the partial output of an aborted call."""
        work = attempt.work
        if len(completion.token_ids):
            work.parts.append(completion)
        if completion.finish != "abort":
            attempt.slot.succeeded()
            self._end(work, "answered", joined(work.id, work.parts))
        elif self._is_held or self._slots.get(attempt.slot.url) is not attempt.slot:
            self.counters.taken_back()
            self._wait_first(work)
        else:
            work.avoided_url = attempt.slot.url
            self._retry(work, "aborted", f"{attempt.slot.url}: the engine aborted it")

    def _failed(self, attempt: _Attempt, error: EngineError | MalformedAnswer) -> None:
        """Handle a call without a usable answer."""
        work, slot = attempt.work, attempt.slot
        is_unreachable = isinstance(error, EngineUnreachable)
        if pause := slot.failed(self._loop.time(), self._backoff_s, is_unreachable):
            self._loop.call_later(pause, self._start_calls)
        if self._on_trouble and isinstance(error, EngineUnreachable | EngineDisconnected):
            self._on_trouble(slot.url)
        self._close_attempt(attempt)
        work.avoided_url = slot.url
        if is_unreachable:  # Nothing was sent, so this does not count as an attempt.
            self.counters.call_failed("unreachable")
            self._wait_first(work)
        elif isinstance(error, MalformedAnswer):
            self._retry(work, error.fault, f"{slot.url}: unusable answer: {error}")
        else:
            self._retry(work, _cause(error), str(error))
        if isinstance(error, EngineTimeout):
            self._start_background(slot.client.abort(attempt.rid))
        if not isinstance(error, MalformedAnswer) or error.fault != "version":
            return
        if self._on_wrong_weights and slot.url in self._slots:
            self._on_wrong_weights(slot.url, error.foreign)

    def _retry(self, work: _Request, cause: Cause, reason: str) -> None:
        """Call again after a delay, or fail the request after its last attempt."""
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

    def _close_attempt(self, attempt: _Attempt) -> None:
        """Remove the attempt, and cancel its task unless that task calls this."""
        del self._attempts[attempt.rid]
        attempt.slot.change_calls(-1, self._loop.time())
        attempt.work.attempt = None
        if not self._attempts:
            self._idle.set()
        if attempt.task and attempt.task is not asyncio.current_task(self._loop):
            attempt.task.cancel()

    def _abandon(self, attempt: _Attempt) -> None:
        """Abort an attempt on an engine that stays in use."""
        self._close_attempt(attempt)
        self._start_background(attempt.slot.client.abort(attempt.rid))

    def _take_back(self, slot: EngineSlot | None = None) -> None:
        """Abandon the attempts on this engine, or all; their requests wait for other calls."""
        attempts = [attempt for attempt in self._attempts.values() if slot in (None, attempt.slot)]
        for attempt in reversed(attempts):
            self._abandon(attempt)
            self.counters.taken_back()
            self._wait_first(attempt.work)
        self._start_calls()

    def _end_with_fault(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        """Fail the request of a call that ended with an unexpected exception, so that nothing waits for ever."""
        if task.cancelled() or not (fault := task.exception()):
            return
        logger.critical("a call of %s failed: %r", attempt.slot.url, fault, exc_info=fault)
        if attempt.rid in self._attempts:
            self._close_attempt(attempt)
            self._fail(attempt.work, f"unexpected exception: {fault!r}")

    # ---- ending requests ----

    def _fail(self, work: _Request, reason: str) -> None:
        self._end(work, "failed", GenerationFailure(work.id, reason))

    def _end(self, work: _Request, end: Literal["answered", "failed"], answer: Answer) -> None:
        self._forget(work)
        self.counters.close(work.id, end)
        work.answer(answer)

    def _forget(self, work: _Request) -> None:
        self._works.remove(work)
        self._waiting.pop(work.id, None)
        self._router.leave(work.prompt)
        if work.retry:
            work.retry.cancel()

    def _wait_first(self, work: _Request) -> None:
        """Put the request at the head of the queue, as it has waited already."""
        self._waiting[work.id] = work
        self._waiting.move_to_end(work.id, last=False)

    def _start_background(self, call: Coroutine[Any, Any, None]) -> None:
        """Start a call whose failure does not matter."""
        task = self._loop.create_task(_ignore_failure(call))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _ignore_failure(call: Coroutine[Any, Any, None]) -> None:
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
