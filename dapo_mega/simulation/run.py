"""Simulates the steps of a run: when its engines and its trainer work, and when they wait for each other."""

import asyncio
import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dapo_mega.config import RunConfig
from dapo_mega.engines.lockstep import LockstepLoop
from dapo_mega.metrics.timeline import Activity, StepTimeline
from dapo_mega.planning.step_time import DecodingSpeed
from dapo_mega.rewards import ComposedReward
from dapo_mega.rollout.collector import Collector
from dapo_mega.rollout.scoring import ResponseScorer, ScoringCounts
from dapo_mega.simulation.engines import FailureTimes, SimulatedEngines
from dapo_mega.types import Prompt, ScoredTrajectory, Trajectory

_NUM_DRAWS = 1 << 16
_NUM_PROMPTS = 10_000
_MEAN_PIECES = 64


@dataclass(frozen=True)
class Workload:
    """What is generated: log-normal lengths with a mean of `mean_length` tokens, whose logarithms have the standard
    deviation `spread`, cut off at `rollout.max_response_tokens`. Dynamic sampling keeps `kept_share` of the groups."""

    mean_length: float
    spread: float
    kept_share: float
    seed: int = 0


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's training and of sending the weights, and the engines. With `failures_per_hour` each engine
    dies so often while it works, and answers again after `restart_s`."""

    training_s: float
    weights_s: float
    num_engines: int
    speed: DecodingSpeed
    failures_per_hour: float = 0.0
    restart_s: float = 300.0


@dataclass(frozen=True)
class SimulatedRun:
    """What a simulated run came to, without its first steps. Engines are idle while they have no response to decode or
    get weights, and away from a failure until they have weights again; `lost_share` of the tokens were lost with them.
    `bound_s` is how long a step takes at least: the time of the slower one of trainer and engines, if neither ever
    waited and all places of all engines were always taken. `mean_age` is that of the tokens, in steps. `timeline` has
    what was done when, from the run's start in seconds."""

    seconds_per_step: float
    bound_s: float
    waiting_share: float
    idle_share: float
    expired_share: float
    mean_age: float
    num_failures: int
    away_share: float
    lost_share: float
    timeline: Sequence[StepTimeline] = field(repr=False)

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.seconds_per_step

    @property
    def share_of_bound(self) -> float:
        """How much of the slower side's own rate the run reaches."""
        return self.bound_s / self.seconds_per_step


def simulate(config: RunConfig, workload: Workload, costs: Costs, num_steps: int) -> SimulatedRun:
    """Run `num_steps` steps of the configuration's schedule, after some until the engines are as far ahead as they may
    be."""
    max_staleness = config.algorithm.max_staleness
    warmup_steps = 3 + 2 * max_staleness
    # Responses are counted in pieces of so many tokens: nothing looks at single ones.
    piece = max(1.0, workload.mean_length / _MEAN_PIECES)
    lengths = _lengths(workload, config.rollout.max_response_tokens, piece)
    speed = replace(costs.speed, base_s=costs.speed.base_s * piece, per_response_s=costs.speed.per_response_s * piece)
    failures = FailureTimes(
        costs.num_engines,
        costs.failures_per_hour,
        costs.restart_s,
        costs.weights_s,
        # An aborted call has answered with its part, which no failure takes back.
        keeps_parts=config.weight_sync.pause == "abort",
        seed=workload.seed,
    )
    engines = SimulatedEngines(costs.num_engines, speed, lambda r: lengths[r.request_id % _NUM_DRAWS], failures)
    config = config.model_copy(update={"num_steps": warmup_steps + num_steps + max_staleness + 1})
    prompts = [Prompt(i, "", np.array([i], np.int32), "") for i in range(_NUM_PROMPTS)]
    activity = Activity(lambda: engines.clock)
    collector = Collector(config, prompts, engines, _Scorer(config, workload), (), activity)
    timeline: list[StepTimeline] = []
    started, waited, age, sums_before = 0.0, 0.0, 0.0, np.zeros(4)
    totals: Counter[str] = Counter()
    loop = VirtualTimeLoop(engines)
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000)  # Else two fifths of the time are the search for garbage among open requests.
    try:
        for step in range(warmup_steps + num_steps):
            if step == warmup_steps:
                started, sums_before = engines.clock, _sums(engines)
                totals.clear()
                timeline.clear()
                waited, age = 0.0, 0.0
            before = engines.clock
            with activity.span("trainer", "rollout"):
                _, metrics = loop.complete(collector.collect(step))
            waited += engines.clock - before
            totals["pieces"] += round(metrics.get("rollout/tokens", 0.0))
            totals["expired"] += round(metrics["rollout/groups_expired_in_flight"])
            totals["offered"] += round(metrics["groups/offered"])
            age += sum(
                int(name.rpartition("_")[2]) * share for name, share in metrics.items() if "token_share_age" in name
            )
            with activity.span("trainer", "update"):
                loop.complete(engines.train(costs.training_s))
            with activity.span("trainer", "weight_sync"):
                engines.update(step + 1, costs.weights_s)
            timeline.append(activity.pop(step + 1, engines.pop_loads()))
    finally:
        loop.shut()
        gc.set_threshold(*thresholds)
    seconds = engines.clock - started
    pieces_per_s = costs.num_engines * speed.tokens_per_s
    idle_s, away_s, num_failures, num_lost = (_sums(engines) - sums_before).tolist()
    return SimulatedRun(
        seconds_per_step=seconds / num_steps,
        bound_s=max(costs.training_s + costs.weights_s, totals["pieces"] / num_steps / pieces_per_s),
        waiting_share=waited / seconds,
        idle_share=idle_s / seconds,
        expired_share=totals["expired"] / max(totals["expired"] + totals["offered"], 1),
        mean_age=age / num_steps,
        num_failures=round(num_failures),
        away_share=away_s / seconds,
        lost_share=num_lost / max(num_lost + totals["pieces"], 1),
        timeline=timeline,
    )


def _sums(engines: SimulatedEngines) -> npt.NDArray[np.float64]:
    """[4] so far: seconds idle and seconds away of one engine on average, failures, and lost tokens."""
    idle_s, away_s = engines.idle_share() * engines.clock, engines.away_share() * engines.clock
    return np.array([idle_s, away_s, engines.num_failures, engines.num_lost])


def _lengths(workload: Workload, longest: int, piece: float) -> list[int]:
    """Drawn lengths of responses, in pieces of `piece` tokens."""
    draws = np.random.default_rng(workload.seed).standard_normal(_NUM_DRAWS)
    scale = math.log(workload.mean_length) - workload.spread**2 / 2
    tokens = np.clip(np.exp(scale + workload.spread * draws), 1, longest)
    lengths: list[int] = np.ceil(tokens / piece).astype(int).tolist()
    return lengths


class _Scorer(ResponseScorer):
    """Of the prompts, `kept_share` have right and wrong responses; all responses to the others are wrong."""

    def __init__(self, config: RunConfig, workload: Workload) -> None:
        self._reward = ComposedReward((), None)
        self.counts = ScoringCounts(Counter())
        self.reads_answers = False
        self._comparison = None
        mixed = np.random.default_rng((workload.seed, 1)).random(_NUM_PROMPTS) < workload.kept_share
        self._is_mixed = mixed.tolist()

    def score(self, asked: Sequence[tuple[Prompt, Trajectory]]) -> list[ScoredTrajectory]:  # type: ignore[override]
        return [
            ScoredTrajectory.judged(
                trajectory, text="", correct=correct, accuracy_reward=float(correct), reward=float(correct)
            )
            for prompt, trajectory in asked
            for correct in (self._is_mixed[prompt.index] and trajectory.id % 2 == 0,)
        ]


T = TypeVar("T")


class VirtualTimeLoop(LockstepLoop):
    """Its time is the clock of simulated engines. What would run beside it is done at once and takes no time."""

    def __init__(self, engines: SimulatedEngines) -> None:
        self._engines = engines
        super().__init__(lambda: engines.go_on(math.inf))

    def time(self) -> float:
        """The engines' clock, in seconds."""
        return self._engines.clock

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _when_all_wait(self, timeout: float | None) -> float:
        if timeout is None:
            return super()._when_all_wait(None)
        # A little later than the timer, as one that a rounded sum falls short of would never end.
        self._engines.go_on((self.time() + timeout) * (1 + 2**-50))
        return 0.0
