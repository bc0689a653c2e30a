"""Engines that decode in simulated time: as fast as a stated GPU, and no response has any contents."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dapo_mega.engines.protocol import RolloutEngine
from dapo_mega.metrics.timeline import Load, LoadHistory
from dapo_mega.metrics.timeline.load import segments_each
from dapo_mega.planning.step_time import DecodingSpeed
from dapo_mega.types import Answer, GenerationRequest, Response


@dataclass(eq=False)
class _Running:
    """A response being decoded. Its engine has decoded `began` tokens of each response when this one's first was to
    come; `spans` are (version, end) of the tokens before the last update."""

    request: GenerationRequest
    length: int
    began: float
    version: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    is_cancelled: bool = False


@dataclass(eq=False)
class _Engine:
    """One engine. `decoded` counts the decoding steps until `clock`; `ends` orders what runs by the step of its end.
    `history` is what runs."""

    speed: DecodingSpeed
    decoded: float = 0.0
    clock: float = 0.0
    history: LoadHistory = field(default_factory=lambda: LoadHistory(0.0))
    busy_s: float = 0.0
    ends: list[tuple[float, int, _Running]] = field(default_factory=list)

    @property
    def num_running(self) -> int:
        """The responses that are being decoded."""
        return self.history.num_open

    def advance(self, clock: float) -> None:
        """Decode until `clock`, before which no response ends."""
        if self.num_running:
            self.busy_s += clock - self.clock
            self.decoded += (clock - self.clock) / self.speed.step_s(self.num_running)
        self.clock = clock

    def next_end(self) -> float:
        """When the next response ends, in seconds."""
        while self.ends and self.ends[0][2].is_cancelled:
            heapq.heappop(self.ends)
        if not self.ends:
            return math.inf
        return self.clock + max(self.ends[0][0] - self.decoded, 0.0) * self.speed.step_s(self.num_running)


class SimulatedEngines(RolloutEngine):
    """Engines of one speed. A request goes to the least loaded engine, in the order of submission; `length_of` says how
    many tokens its response will have. `clock` is in seconds; it moves while answers are waited for, and by `advance`
    and `update`."""

    def __init__(self, num_engines: int, speed: DecodingSpeed, length_of: Callable[[GenerationRequest], int]) -> None:
        self.clock = 0.0
        self.version = 0
        self._length_of = length_of
        self._engines = [_Engine(speed) for _ in range(num_engines)]
        self._next_ends = [math.inf] * num_engines
        self._running: dict[int, tuple[_Running, int]] = {}
        self._waiting: deque[GenerationRequest] = deque()
        self._answers: deque[Answer] = deque()
        self._cancelled: set[int] = set()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `RolloutEngine`."""
        self._waiting.extend(requests)
        self._start()

    def next_answer(self) -> Answer:
        """See `RolloutEngine`."""
        while not self._answers:
            assert self._running, "nothing is asked"
            self._end_next()
        return self._answers.popleft()

    def poll_answer(self) -> Answer | None:
        """See `RolloutEngine`."""
        return self._answers.popleft() if self._answers else None

    def oldest_versions(self, request_ids: Sequence[int]) -> dict[int, int]:
        """See `RolloutEngine`."""
        found = {}
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is None:
                found[request_id] = self.version
            else:
                found[request_id] = running[0].spans[0][0] if running[0].spans else running[0].version
        return found

    def cancel(self, request_ids: Sequence[int]) -> None:
        """See `RolloutEngine`."""
        for request_id in request_ids:
            if found := self._running.pop(request_id, None):
                running, number = found
                engine = self._engines[number]
                engine.advance(self.clock)
                running.is_cancelled = True
                engine.history.change(self.clock, -1)
                self._next_ends[number] = engine.next_end()
            else:
                self._cancelled.add(request_id)
        self._start()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """See `RolloutEngine`."""
        raise NotImplementedError("evaluations are not simulated")

    def advance(self, clock: float) -> None:
        """Decode until `clock`."""
        while min(self._next_ends) <= clock:
            self._end_next()
        self.clock = max(clock, self.clock)

    def update(self, version: int, seconds: float) -> None:
        """Send weights, which takes so long and stops all decoding; responses go on with them."""
        for engine in self._engines:
            engine.advance(self.clock)
            engine.clock += seconds
        for running, number in self._running.values():
            done = int(self._engines[number].decoded - running.began)
            if done > (running.spans[-1][1] if running.spans else 0):
                running.spans.append((running.version, done))
            running.version = version
        self.clock += seconds
        self.version = version
        self._next_ends = [engine.next_end() for engine in self._engines]

    def idle_share(self) -> float:
        """The share of the engines' time so far in which they had nothing to decode."""
        for engine in self._engines:
            engine.advance(max(self.clock, engine.clock))
        return 1 - sum(engine.busy_s for engine in self._engines) / (self.clock * len(self._engines))

    def pop_loads(self) -> dict[str, list[Load]]:
        """See `RolloutFleet`, in simulated seconds."""
        num_segments = segments_each(len(self._engines))
        return {
            f"engine {number:0{len(str(len(self._engines)))}}": engine.history.pop(self.clock, num_segments)
            for number, engine in enumerate(self._engines, start=1)
        }

    def _start(self) -> None:
        while self._waiting:
            number = min(range(len(self._engines)), key=lambda i: self._engines[i].num_running)
            engine = self._engines[number]
            if engine.num_running >= engine.speed.places:
                return
            request = self._waiting.popleft()
            if request.request_id in self._cancelled:
                self._cancelled.remove(request.request_id)
                continue
            engine.advance(max(self.clock, engine.clock))
            running = _Running(request, self._length_of(request), engine.decoded, self.version)
            heapq.heappush(engine.ends, (engine.decoded + running.length, request.request_id, running))
            engine.history.change(self.clock, 1)
            self._running[request.request_id] = running, number
            self._next_ends[number] = engine.next_end()

    def _end_next(self) -> None:
        """Move to the end of the next response."""
        clock = min(self._next_ends)
        number = self._next_ends.index(clock)
        engine = self._engines[number]
        engine.advance(clock)
        self.clock = clock
        _, request_id, running = heapq.heappop(engine.ends)
        engine.history.change(clock, -1)
        del self._running[request_id]
        self._next_ends[number] = engine.next_end()
        self._answers.append(_response(running))
        self._start()


def _response(running: _Running) -> Response:
    """All tokens are 0."""
    length = running.length
    spans = tuple(running.spans)
    if not spans or spans[-1][1] < length:
        spans = (*spans, (running.version, length))
    return Response(
        request_id=running.request.request_id,
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        finish_reason="stop",
        weight_version=spans[0][0],
        version_spans=spans,
    )
