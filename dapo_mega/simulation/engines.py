"""Engines that decode in simulated time: as fast as a stated GPU, and no response has any contents."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dapo_mega.engines.protocol import Generation, RolloutEngine
from dapo_mega.errors import InputError
from dapo_mega.metrics.timeline import Load, LoadHistory
from dapo_mega.metrics.timeline.load import segments_each
from dapo_mega.planning.step_time import DecodingSpeed
from dapo_mega.types import GenerationRequest, Response

_MOST_FAILURES = 200
"""Of an engine on average, without a response that ends on any."""


class _Work(Generation):
    """A response, waiting or being decoded by the engine `number`, which had decoded `began` tokens of each response
    when this one's first was to come; `spans` are (version, end) of the tokens before the last update."""

    def __init__(self, request: GenerationRequest, length: int, engines: "SimulatedEngines") -> None:
        super().__init__(request, asyncio.get_running_loop())
        self.length = length
        self.number: int | None = None
        self.began = 0.0
        self.version = 0
        self.spans: list[tuple[int, int]] = []
        self._engines = engines

    @property
    def num_kept(self) -> int:
        """The tokens before the last update."""
        return self.spans[-1][1] if self.spans else 0

    def oldest_version(self) -> int:
        if self.spans:
            return self.spans[0][0]
        return self._engines.version if self.number is None else self.version

    def cancel(self, msg: Any = None) -> bool:
        """Give its place to the next."""
        if is_cancelled := super().cancel(msg):
            self._engines.give_up(self)
        return is_cancelled


@dataclass(eq=False)
class _Engine:
    """One engine. `decoded` counts the decoding steps until `clock`; `ends` orders what runs by the step of its end.
    `history` is what runs. It is `away` from a failure until it has weights again, since `left_at`."""

    speed: DecodingSpeed
    decoded: float = 0.0
    clock: float = 0.0
    history: LoadHistory = field(default_factory=lambda: LoadHistory(0.0))
    busy_s: float = 0.0
    ends: list[tuple[float, int, _Work]] = field(default_factory=list)
    away: bool = False
    is_outdated: bool = False
    left_at: float = 0.0
    away_s: float = 0.0

    @property
    def num_running(self) -> int:
        """The responses that are being decoded."""
        return self.history.num_open

    def advance(self, clock: float) -> None:
        """Decode until `clock`, before which no response ends. An engine that gets weights is ahead of it."""
        if clock <= self.clock:
            return
        if self.num_running:
            self.busy_s += clock - self.clock
            self.decoded += (clock - self.clock) / self.speed.step_s(self.num_running)
        self.clock = clock

    def next_end(self) -> float:
        """When the next response ends, in seconds."""
        while self.ends and self.ends[0][2].cancelled():
            heapq.heappop(self.ends)
        if not self.ends:
            return math.inf
        return self.clock + max(self.ends[0][0] - self.decoded, 0.0) * self.speed.step_s(self.num_running)


class SimulatedEngines(RolloutEngine):
    """Engines of one speed. A request goes to the least loaded engine, in the order of `generate`; `length_of` says how
    many tokens its response will have. `clock` is in seconds; it moves by `go_on` and `update`. With `failures` engines
    die and come back; `num_failures` and `num_lost` tokens are counted."""

    def __init__(
        self,
        num_engines: int,
        speed: DecodingSpeed,
        length_of: Callable[[GenerationRequest], int],
        failures: "FailureTimes | None" = None,
    ) -> None:
        self.clock = 0.0
        self.version = 0
        self.num_failures = 0
        self.num_lost = 0
        self._length_of = length_of
        self._engines = [_Engine(speed) for _ in range(num_engines)]
        self._next_ends = [math.inf] * num_engines
        self._room = [float(-speed.places)] * num_engines
        self._failures = failures or FailureTimes(num_engines)
        self.open: dict[int, _Work] = {}
        self._waiting: deque[_Work] = deque()
        self._is_training = False
        self._fruitless = 0

    def generate(self, request: GenerationRequest) -> Generation:
        work = self.open[request.request_id] = _Work(request, self._length_of(request), self)
        self._waiting.append(work)
        self._start()
        return work

    def give_up(self, work: _Work) -> None:
        """The request was cancelled."""
        del self.open[work.request.request_id]
        if work.number is not None:
            self._leave(work.number)
        self._start()

    async def train(self, seconds: float) -> None:
        """Decode while the trainer trains: engines that come back wait for the next update, and otherwise get weights
        at once."""
        self._is_training, end = True, self.clock + seconds
        await asyncio.sleep(seconds)
        self.clock = end  # The timer's end is rounded.
        self._is_training, self._fruitless = False, 0

    def go_on(self, until: float) -> bool:
        """Move to the end of the next response, to the next failure or return of an engine, or to `until`, whichever is
        first. Returns whether there is any of these to wait for. Raises InputError if engines die too often for any
        response to end."""
        if not self._is_training:
            if self._fruitless > _MOST_FAILURES * len(self._engines):
                raise InputError(
                    f"each engine failed {_MOST_FAILURES} times and no response ended; give a lower "
                    "--engine-failures-per-hour, or a shorter --engine-restart-s"
                )
            # The trainer waits, so engines that are back get its weights at once; the others go on.
            for number, engine in enumerate(self._engines):
                if engine.is_outdated:
                    self._serve(number, self._failures.weights_s)
                    self._start()
        if min(*self._next_ends, self._failures.next_at) <= until and (self.open or until < math.inf):
            self._next()
        elif until < math.inf:
            self.clock = max(self.clock, until)
        else:
            return False
        return True

    def update(self, version: int, seconds: float) -> None:
        """Send weights, which takes so long and stops all decoding; responses go on with them."""
        for work in self.open.values():
            if work.number is None:
                continue
            engine = self._engines[work.number]
            engine.advance(self.clock)
            done = int(engine.decoded - work.began)
            if done > work.num_kept:
                work.spans.append((work.version, done))
            work.version = version
        for number, engine in enumerate(self._engines):
            if not engine.away:
                engine.advance(self.clock)
                engine.clock += seconds
            elif engine.is_outdated:
                self._serve(number, seconds)
        self.clock += seconds
        self.version = version
        self._next_ends = [engine.next_end() for engine in self._engines]
        self._start()

    def away_share(self) -> float:
        """The share of the engines' time so far in which they had failed and had no weights yet."""
        away = sum(engine.away_s + (self.clock - engine.left_at) * engine.away for engine in self._engines)
        return away / (self.clock * len(self._engines))

    def idle_share(self) -> float:
        """The share of the engines' time so far in which they were there and had nothing to decode."""
        for engine in self._engines:
            engine.advance(self.clock)
        busy = sum(engine.busy_s for engine in self._engines) / (self.clock * len(self._engines))
        return 1 - busy - self.away_share()

    def pop_loads(self) -> dict[str, list[Load]]:
        """See `RolloutFleet`, in simulated seconds."""
        num_segments = segments_each(len(self._engines))
        return {
            f"engine {number:0{len(str(len(self._engines)))}}": engine.history.pop(self.clock, num_segments)
            for number, engine in enumerate(self._engines, start=1)
        }

    def _start(self) -> None:
        while self._waiting:
            room = min(self._room)
            if room >= 0:
                return
            work = self._waiting.popleft()
            if work.cancelled():
                continue
            number = self._room.index(room)
            engine = self._engines[number]
            engine.advance(self.clock)
            work.number, work.began, work.version = number, engine.decoded - work.num_kept, self.version
            heapq.heappush(engine.ends, (work.began + work.length, work.request.request_id, work))
            engine.history.change(self.clock, 1)
            self._room[number] += 1
            self._next_ends[number] = engine.next_end()

    def _leave(self, number: int) -> None:
        engine = self._engines[number]
        engine.advance(self.clock)
        engine.history.change(self.clock, -1)
        self._room[number] -= 1
        self._next_ends[number] = engine.next_end()

    def _next(self) -> None:
        """Move to the end of the next response, or to the next failure or return of an engine."""
        clock = min(self._next_ends)
        if self._failures.next_at > clock:
            self._end(self._next_ends.index(clock), clock)
            return
        clock, number, fails = self._failures.pop(self.clock)
        self.clock = max(clock, self.clock)
        self.num_failures += fails
        self._fruitless += fails
        engine = self._engines[number]
        if fails and not engine.away:
            self._fail(number)
            self._start()
        engine.is_outdated = not fails

    def _end(self, number: int, clock: float) -> None:
        engine = self._engines[number]
        engine.advance(clock)
        self.clock = clock
        _, request_id, work = heapq.heappop(engine.ends)
        self._leave(number)
        del self.open[request_id]
        if work.num_kept < work.length:
            work.spans.append((work.version, work.length))
        work.answer(
            Response(
                request_id=request_id,
                token_ids=np.zeros(work.length, np.int32),
                logprobs=np.zeros(work.length, np.float32),
                finish_reason="stop",
                weight_version=work.spans[0][0],
                version_spans=tuple(work.spans),
            )
        )
        self._fruitless = 0
        self._start()

    def _fail(self, number: int) -> None:
        """The engine dies: what it decoded since the last update is lost, and its responses go first to others."""
        engine = self._engines[number]
        engine.advance(self.clock)
        lost = sorted((work for _, _, work in engine.ends if not work.cancelled()), key=lambda w: -w.request.request_id)
        for work in lost:
            if not self._failures.keeps_parts:
                work.spans.clear()
            self.num_lost += max(0, int(engine.decoded - work.began) - work.num_kept)
            work.number = None
            self._waiting.appendleft(work)
        engine.history.change(self.clock, -engine.num_running)
        engine.ends.clear()
        engine.away, engine.left_at = True, self.clock
        self._next_ends[number] = self._room[number] = math.inf

    def _serve(self, number: int, seconds: float) -> None:
        """The engine gets weights, which takes so long, and decodes again."""
        engine = self._engines[number]
        engine.away_s += self.clock - engine.left_at
        engine.clock = self.clock + seconds
        engine.away = engine.is_outdated = False
        self._room[number] = float(-engine.speed.places)


class FailureTimes:
    """The failures and returns of `num_engines` engines in the order of their times, in seconds."""

    def __init__(
        self,
        num_engines: int,
        per_hour: float = 0.0,
        restart_s: float = 0.0,
        weights_s: float = 0.0,
        *,
        keeps_parts: bool = False,
        seed: int = 0,
    ) -> None:
        """Each engine dies `per_hour` times in an hour of work, at random, and answers again after `restart_s` seconds;
        the weights that it then needs take `weights_s`. With `keeps_parts` a response loses what its engine decoded
        since the last update, else everything."""
        self.weights_s = weights_s
        self.keeps_parts = keeps_parts
        self._per_hour = per_hour
        self._restart_s = restart_s
        self._random = np.random.default_rng((seed, 2))
        self._is_down = [False] * num_engines
        self._times = [(self.until_failure(), number) for number in range(num_engines)]
        heapq.heapify(self._times)

    @property
    def next_at(self) -> float:
        """When the next engine fails or returns; infinity if none ever does."""
        return self._times[0][0]

    def pop(self, now: float) -> tuple[float, int, bool]:
        """(time, engine, whether it fails) of the next failure or return. What follows it is counted from then, or from
        `now` if that is later."""
        time, number = heapq.heappop(self._times)
        self._is_down[number] = not self._is_down[number]
        lasts = self._restart_s if self._is_down[number] else self.until_failure()
        heapq.heappush(self._times, (max(time, now) + lasts, number))
        return time, number, self._is_down[number]

    def until_failure(self) -> float:
        """Seconds that an engine works, drawn at random."""
        return float(self._random.exponential(3600 / self._per_hour)) if self._per_hour else math.inf
