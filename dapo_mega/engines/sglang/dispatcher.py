"""Sends requests to the engines of a fleet and gives each request exactly one answer.

::

    generate -> waiting -> call on an engine -> Response
                   ^             |
                   +-------------+      the call failed, the engine left, or its weights are being replaced
                                 +----> GenerationFailure, after `max_attempts` failed calls

Everything runs on one event loop. Waiting requests are entries of a queue. One that gets a place at an engine is a task
until it has its answer or waits again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from dapo_mega.engines.protocol import Generation
from dapo_mega.engines.sglang.api import (
    Completion,
    Fault,
    MalformedAnswer,
    RouteSizes,
    ended_by_text,
    generate_payload,
    joined,
    parse_answer,
    unfit,
)
from dapo_mega.engines.sglang.engine_client import CallFault, EngineClient, EngineError
from dapo_mega.engines.sglang.prefix_routing import EngineRouter, EngineSlot, load_metrics
from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion
from dapo_mega.metrics.timeline import Load, LoadHistory
from dapo_mega.metrics.timeline.load import segments_each
from dapo_mega.types import Answer, GenerationFailure, GenerationRequest

logger = logging.getLogger(__name__)

End = Literal["answered", "failed", "cancelled"]
Cause = Literal[Fault, CallFault, "aborted"]
"""Why a call did not answer its request."""

_COUNTED = (
    *("requests_submitted", *(f"requests_{end}" for end in get_args(End))),
    # Calls that were given up: their engine left, or they were aborted and continue with new weights.
    *("requests_moved", "requests_taken_back"),
    *("failed_calls", *(f"failed_calls_{cause}" for cause in get_args(Cause))),
)
_WITHDRAWAL_S = 10.0


class _Request(Generation):
    """A request until it has its answer. `parts` are the partial outputs of its aborted calls. `task` makes its call
    and waits after one that failed; `version` is the engine's weight version when the call began, while there is one.
    """

    def __init__(self, request: GenerationRequest, dispatcher: Dispatcher) -> None:
        super().__init__(request, asyncio.get_running_loop())
        self._dispatcher = dispatcher
        self.prompt = hashlib.blake2b(request.prompt_token_ids.tobytes(), digest_size=16).digest()
        self.parts: list[Completion] = []
        self.num_calls = self.num_failures = 0
        self.avoided_url = self.rid = ""
        self.version: int | None = None
        self.task: asyncio.Task[None] | None = None

    def oldest_version(self) -> int:
        under_way = self._dispatcher.newest_version if self.version is None else self.version
        return min([under_way, *(version for part in self.parts for version, _ in part.version_spans)])

    def cancel(self, msg: object = None) -> bool:
        if not super().cancel(msg):
            return False
        self._dispatcher.give_up(self)
        return True


class Dispatcher:
    """Owns all requests between `generate` and their answer. Made and used on one running event loop.

    `open` are the open requests by id. `counts` are those since the start: every submitted request is answered, failed,
    cancelled or still open, and counted once.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        requests_per_engine: int,
        request_timeout_s: float,
        max_attempts: int,
        on_trouble: Callable[[str], None] = lambda url: None,
        on_wrong_weights: Callable[[str, WeightVersion | None], None] = lambda url, weights: None,
        run: str = "",
        backoff_s: float = 0.5,
        seed: int = 0,
        most_calls: int = sys.maxsize,
        adapter: str = "",
        route_sizes: RouteSizes | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`run` is the name of this run's weights. Callbacks: `on_trouble(url)` when a connection fails;
        `on_wrong_weights(url, weights)` when an engine answers with weights that it was not given, where `weights` is
        None unless they are another run's.

        A call takes at most `request_timeout_s`. After a failed call its request waits `backoff_s`, doubled each time
        and with jitter from `seed`, and then goes to another engine if there is one. At most `most_calls` are made at
        the same time, for which this process may open enough files. Calls name the LoRA `adapter`.
        `route_sizes` are those of the experts that requests may ask for. `decode` makes text of tokens, where texts end
        responses: an engine does not see one that begins in one call and ends in the next.
        """
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._most_calls = most_calls
        self._on_trouble = on_trouble
        self._on_wrong_weights = on_wrong_weights
        self._backoff_s = backoff_s
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._own_run = run
        self._adapter = adapter
        self._route_sizes = route_sizes
        self._decode = decode
        self._call_prefix = os.urandom(4).hex()
        self._router = EngineRouter(requests_per_engine)
        self._slots: dict[str, EngineSlot] = {}
        self._histories: dict[str, LoadHistory] = {}
        self.newest_version = -1
        self._waiting: OrderedDict[_Request, None] = OrderedDict()
        self._calls: dict[_Request, EngineSlot] = {}
        self._is_held = self._is_starting = self._lacks_files = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborts: set[asyncio.Task[None]] = set()
        self.open: dict[int, _Request] = {}
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()

    # ---- engines ----

    def add_engine(self, client: EngineClient, version: int) -> None:
        """Send requests to this engine, which holds weights of this version."""
        assert client.url not in self._slots
        now = self._loop.time()
        history = self._histories.setdefault(client.url, LoadHistory(now))
        slot = self._slots[client.url] = EngineSlot(client, version, history)
        slot.pop_load(now)
        self.newest_version = max(self.newest_version, version)
        self._start_calls()

    def set_version(self, url: str, version: int) -> None:
        """Record the version of the engine's new weights; call before it generates with them."""
        self._slots[url].version = version
        self.newest_version = max(self.newest_version, version)

    def remove_engine(self, url: str, reason: str) -> None:
        """Stop using the engine; its requests go to other engines at once."""
        slot = self._slots.pop(url)
        if num_moved := self._take_back(slot, has_left=True):
            logger.debug("%d requests move away from %s: %s", num_moved, url, reason)
            self._abort(slot)
        self._start_calls()

    def withdraw_engine(self, url: str) -> None:
        """Send nothing more to an engine that stays up. Its calls are ended early and go on elsewhere after what they
        have generated; one that does not return within `_WITHDRAWAL_S` is sent again."""
        slot = self._slots.pop(url)
        for work, at in self._calls.items():
            if at is slot:
                self._abort(slot, work.rid)
        self._loop.call_later(_WITHDRAWAL_S, self._take_back, slot)
        self._start_calls()

    def engines(self) -> list[EngineSlot]:
        return list(self._slots.values())

    # ---- requests ----

    def generate(self, request: GenerationRequest) -> Generation:
        """Queue the request. One that must not be sent to an engine has its failure at once. Raises ValueError if its
        id is open already."""
        if request.request_id in self.open:
            raise ValueError(f"request {request.request_id} is in flight already; give every request its own id")
        work = self.open[request.request_id] = _Request(request, self)
        self.counts["requests_submitted"] += 1
        self._router.enter(work.prompt)
        if reason := unfit(request, self._vocab_size):
            self._fail(work, f"the request was not sent: {reason}")
        else:
            self._waiting[work] = None
            self._start_calls()
        return work

    def give_up(self, work: _Request) -> None:
        """End a request that was cancelled."""
        slot = self._calls.get(work)
        self._interrupt(work)
        if slot:
            self._abort(slot, work.rid)
        self._end(work, "cancelled")

    def fail_all(self, reason: str) -> None:
        for work in list(self.open.values()):
            self._interrupt(work)
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
        """The counts and the engines' load since the last call, and the requests in attempt and waiting now."""
        reported, self._reported = self._reported, self.counts.copy()
        return {
            **{f"rollout/{name}": float(self.counts[name] - reported[name]) for name in _COUNTED},
            **load_metrics(self._slots.values(), self._loop.time()),
            "rollout/requests_in_flight": float(len(self._calls)),
            "rollout/requests_waiting": float(len(self.open) - len(self._calls)),
            "rollout/requests_open": float(len(self.open)),
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
        works = list(self.open.values())
        tasks = [*self._aborts, *(work.task for work in works if work.task)]
        for task in self._aborts:
            task.cancel()
        for work in works:
            self._interrupt(work)
            work.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- calls ----

    def _start_calls(self) -> None:
        """Start what can be started, once all has happened that is happening now."""
        if not self._is_starting:
            self._is_starting = True
            self._loop.call_soon(self._start_all)

    def _start_all(self) -> None:
        self._is_starting = False
        if self._is_held or not self._waiting:
            return
        now = self._loop.time()
        free = [slot for slot in self._slots.values() if self._router.has_room(slot, now)]
        while chosen := self._next_call(free):
            work, slot = chosen
            del self._waiting[work]
            self._calls[work] = slot
            self._idle.clear()
            self._router.holders[work.prompt] = slot.url
            slot.change_calls(1, now)
            if not self._router.has_room(slot, now):
                free.remove(slot)
            work.num_calls += 1
            # Engines abort every call whose rid has the given prefix: the dot ends the prefix.
            work.rid = f"{self._call_prefix}-{work.request.request_id}-{work.num_calls}."
            work.version = slot.version
            work.task = self._loop.create_task(self._serve(work, slot, slot.version))
            work.task.add_done_callback(partial(self._end_with_fault, work, slot.url))

    def _next_call(self, free: list[EngineSlot]) -> tuple[_Request, EngineSlot] | None:
        """The first waiting request that one of the engines with room may have, with that engine."""
        if len(self._calls) >= self._most_calls:
            if free and self._waiting and not self._lacks_files:
                self._lacks_files = True
                logger.warning(
                    "engines have room, but only %d requests are sent at a time: this process may not open more files. "
                    "Raise the hard limit (ulimit -Hn) before its start",
                    self._most_calls,
                )
        elif free:
            for work in self._waiting:
                allowed = free
                if work.avoided_url and len(self._slots) > 1:  # The engine that failed it last.
                    allowed = [slot for slot in free if slot.url != work.avoided_url]
                if slot := self._router.choose(allowed, work.prompt, work.request.engine):
                    return work, slot
        return None

    async def _serve(self, work: _Request, slot: EngineSlot, version: int) -> None:
        """Call the engine. Afterwards the request has its answer, or waits again, after a delay if the call failed."""
        task = work.task
        cause: Cause
        payload = generate_payload(work.request, work.parts, work.rid, self._adapter)
        try:
            besides = self._route_sizes.num_bytes(work.request) if self._route_sizes else 0
            body = await slot.client.generate(payload, self._request_timeout_s, besides)
            versions = VersionRange(self._own_run, version, self.newest_version)
            outcome: Completion | EngineError | MalformedAnswer = parse_answer(
                body, work.request, work.parts, self._vocab_size, versions, slot.url, self._route_sizes
            )
        except (EngineError, MalformedAnswer) as error:
            outcome = error
        if work.task is not task:
            return  # It was interrupted, and what cancels it came as its time ran out.
        self._end_call(work)
        if isinstance(outcome, Completion):
            if len(outcome.token_ids):
                work.parts.append(outcome)
                if self._decode and (ended := ended_by_text(work.parts, work.request.sampling, self._decode)):
                    outcome = work.parts[-1] = ended
            if outcome.finish != "abort":
                slot.succeeded()
                self._end(work, "answered", joined(work.request.request_id, work.parts))
                return
            if self._is_held or self._slots.get(slot.url) is not slot:
                self.counts["requests_taken_back"] += 1
                self._wait_first(work)
                return
            cause, reason = "aborted", f"{slot.url}: the engine aborted it"
        else:
            self._learn(slot, work.rid, outcome)
            cause, reason = outcome.fault, str(outcome)
            if isinstance(outcome, MalformedAnswer):
                reason = f"{slot.url}: unusable answer: {reason}"
        self.counts["failed_calls"] += 1
        self.counts[f"failed_calls_{cause}"] += 1
        work.avoided_url = slot.url
        if cause != "unreachable":  # Nothing was sent then, so it does not count as an attempt.
            work.num_failures += 1
            if work.num_failures >= self._max_attempts:
                self._fail(work, f"{work.num_failures} attempts failed, lastly {reason}")
                return
            await asyncio.sleep(self._backoff_s * 2.0 ** (work.num_failures - 1) * self._random.uniform(0.5, 1.5))
        self._wait_first(work)

    def _learn(self, slot: EngineSlot, rid: str, failure: EngineError | MalformedAnswer) -> None:
        """Do what a failed call asks for at its engine."""
        if pause := slot.failed(self._loop.time(), self._backoff_s, failure.fault == "unreachable"):
            self._loop.call_later(pause, self._start_calls)
        if failure.fault in ("unreachable", "disconnected"):
            self._on_trouble(slot.url)
        if failure.fault == "timeout":
            self._abort(slot, rid)
        if isinstance(failure, MalformedAnswer) and failure.fault == "version" and slot.url in self._slots:
            self._on_wrong_weights(slot.url, failure.foreign)

    def _end_call(self, work: _Request) -> None:
        """Free the call's place."""
        self._calls.pop(work).change_calls(-1, self._loop.time())
        work.version = None
        if not self._calls:
            self._idle.set()
        self._start_calls()

    def _interrupt(self, work: _Request) -> None:
        """Cancel the request's call or its delay, if it does not wait for a place."""
        if work.task:
            work.task.cancel()
            work.task = None
        if work in self._calls:
            self._end_call(work)

    def _take_back(self, slot: EngineSlot | None = None, *, has_left: bool = False) -> int:
        """Interrupt the calls of this engine, or all; their requests wait for other calls. Returns how many."""
        calls = [(work, at) for work, at in self._calls.items() if slot in (None, at)]
        for work, at in reversed(calls):
            self._interrupt(work)
            if not has_left:
                self._abort(at, work.rid)
            self.counts["requests_moved" if has_left else "requests_taken_back"] += 1
            self._wait_first(work)
        return len(calls)

    def _wait_first(self, work: _Request) -> None:
        """Put the request at the head of the queue, as it has waited already."""
        work.task = None
        self._waiting[work] = None
        self._waiting.move_to_end(work, last=False)
        self._start_calls()

    def _abort(self, slot: EngineSlot, rid: str | None = None) -> None:
        """Let the engine abort this call, or all, in the background; that this fails does not matter."""

        async def abort() -> None:
            try:
                async with slot.aborting:
                    await slot.client.abort(rid, all=rid is None)
            except EngineError as error:
                logger.debug("%s", error)

        task = self._loop.create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    # ---- ending requests ----

    def _end_with_fault(self, work: _Request, url: str, task: asyncio.Task[None]) -> None:
        """Fail the request of a task that ended with an unexpected exception, so that nothing waits for ever."""
        if task.cancelled() or not (fault := task.exception()):
            return
        logger.critical("a call of %s failed: %r", url, fault, exc_info=fault)
        if work.task is task:
            self._interrupt(work)
            self._fail(work, f"unexpected exception: {fault!r}")

    def _fail(self, work: _Request, reason: str) -> None:
        self._end(work, "failed", GenerationFailure(work.request.request_id, reason))

    def _end(self, work: _Request, end: End, answer: Answer | None = None) -> None:
        ended = self.open.pop(work.request.request_id, None)
        assert ended is work, f"request {work.request.request_id} ended twice"
        self.counts[f"requests_{end}"] += 1
        self._waiting.pop(work, None)
        self._router.leave(work.prompt)
        if answer:
            work.answer(answer)
