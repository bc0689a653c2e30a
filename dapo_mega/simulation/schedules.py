"""Compares the schedules of a planned run: steps per hour, and who waits for whom."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dapo_mega.config import RunConfig
from dapo_mega.config.files import validated
from dapo_mega.errors import InputError, StarvedError
from dapo_mega.metrics.timeline.file import write_timeline
from dapo_mega.planning.estimate import Estimate
from dapo_mega.planning.report import seconds
from dapo_mega.simulation.run import Costs, SimulatedRun, Workload, simulate

SCHEDULES = (("synchronous", 1), ("partial", 1), ("asynchronous", 1), ("asynchronous", 2), ("asynchronous", 4))
"""Each with its `algorithm.max_staleness`."""


_COLUMNS = (
    "schedule", "max_staleness", "steps/hour", "s/step", "of the slower side", "trainer waits", "engines idle", "age",
    "expired",
)  # fmt: skip
_COLUMNS_OF_FAILURES = ("failures", "engines away", "decoded again")


@dataclass(frozen=True)
class Assumed:
    """What a simulation assumes beside the plan: see `Workload` and `Costs`."""

    spread: float
    kept_share: float
    num_steps: int
    failures_per_hour: float = 0.0
    restart_s: float = 300.0

    def workload(self, plan: Estimate) -> Workload:
        """What the planned run generates."""
        is_filtered = plan.workload.config.algorithm.dynamic_sampling
        return Workload(plan.workload.mean_response, self.spread, self.kept_share if is_filtered else 1.0)


def simulated_lines(plan: Estimate, assumed: Assumed, timelines: Path | None = None) -> Iterator[str]:
    """A table of the schedules of the planned run. Raises InputError for a run without engines of their own.

    With `timelines` each schedule gets a folder there, with a timeline as a run has it.
    """
    placement = plan.workload.config.rollout.placement
    if placement != "fleet":
        raise InputError(
            f"--simulate compares when a fleet's engines and the trainer work, and rollout.placement={placement} lets "
            "them take turns; add rollout.placement=fleet rollout.fleet.rendezvous=HOST:PORT"
        )
    if not plan.engine_fits or not plan.generation.rows:
        raise InputError("--simulate needs engines that fit; the plan without it says what they lack")
    costs, workload = costs_of(plan, assumed), assumed.workload(plan)
    fails = costs.failures_per_hour > 0
    about_failures = (
        f"; each engine fails {costs.failures_per_hour:g} times an hour (--engine-failures-per-hour) and answers again "
        f"after {seconds(costs.restart_s)} s (--engine-restart-s)"
    )
    yield (
        f"simulated, {assumed.num_steps} steps of each schedule: {costs.num_engines} engines, each at most "
        f"{costs.speed.places} responses at once and then {costs.speed.tokens_per_s:,.0f} tokens/s; training "
        f"{seconds(costs.training_s)} s and weights {seconds(costs.weights_s)} s a step; lengths log-normal with "
        f"mean {workload.mean_length:,.0f} and spread {workload.spread:.3g} (--length-spread), "
        f"{workload.kept_share:.0%} of the groups kept (--kept-share)" + about_failures * fails
    )
    columns = _COLUMNS + _COLUMNS_OF_FAILURES * fails
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for schedule, max_staleness in SCHEDULES:
        found = simulated(plan, (schedule, max_staleness), assumed)
        if timelines:
            write_timeline(timelines / f"{schedule}_{max_staleness}", found.timeline)
        yield f"| {schedule} | {max_staleness} | {_cells(found, fails)} |"
    if timelines:
        yield f"timelines: dapo-mega plot {timelines}/SCHEDULE --timeline"


def _cells(found: SimulatedRun, fails: bool) -> str:
    of_failures = f" | {found.num_failures} | {found.away_share:.1%} | {found.lost_share:.1%}"
    return (
        f"{found.steps_per_hour:.2f} | {seconds(found.seconds_per_step)} | {found.share_of_bound:.0%} | "
        f"{found.waiting_share:.0%} | {found.idle_share:.0%} | {found.mean_age:.1f} | {found.expired_share:.0%}"
    ) + of_failures * fails


def simulated(plan: Estimate, schedule: tuple[str, int], assumed: Assumed) -> SimulatedRun:
    """The planned run in a schedule with its `algorithm.max_staleness`. Raises InputError if no step gets its
    groups."""
    config, workload = plan.workload.config, assumed.workload(plan)
    try:
        return simulate(_scheduled(config, *schedule), workload, costs_of(plan, assumed), assumed.num_steps)
    except StarvedError as error:
        raise InputError(
            f"algorithm.max_generation_rounds={config.algorithm.max_generation_rounds} rounds of "
            f"{config.generation_groups} groups do not yield a step's {config.batch.groups_per_step} if "
            f"{workload.kept_share:g} of them are kept; raise --kept-share, batch.generation_groups or the rounds"
        ) from error


def costs_of(plan: Estimate, assumed: Assumed) -> Costs:
    """What the plan's training, weights and engines cost. Its engines must fit."""
    places = min(plan.generation.speed.places, plan.workload.config.rollout.fleet.requests_per_engine)
    return Costs(
        training_s=plan.time.training,
        weights_s=plan.time.weights,
        num_engines=plan.engine.num_engines(plan.workload.placement.data_size),
        speed=replace(plan.generation.speed, places=places),
        failures_per_hour=assumed.failures_per_hour,
        restart_s=assumed.restart_s,
    )


def _scheduled(config: RunConfig, schedule: str, max_staleness: int) -> RunConfig:
    raw = config.model_dump()
    # Engines that take turns with the trainer are simulated as a fleet of the synchronous schedule.
    raw["rollout"] |= {"placement": "fleet", "schedule": schedule}
    raw["weight_sync"]["transport"] = "auto"
    raw["algorithm"]["max_staleness"] = max_staleness
    raw["weight_sync"]["in_flight"] = "continue"
    # Prompts and rewards are simulated.
    raw["data"] |= {"train": {"path": "simulated"}, "mixture": {}, "evaluation": None, "sampling": {}}
    raw["reward"] = {"overlong_punishment": False}
    raw["algorithm"]["dynamic_sampling_on"] = "correctness"
    raw["evaluation"] = {"every": 0, "at_start": False, "at_end": False}
    return validated(RunConfig, raw)
