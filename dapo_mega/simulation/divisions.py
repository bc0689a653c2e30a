"""Simulates the most promising divisions of GPUs between trainer and engines, each in the schedule that suits it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dapo_mega.config import RunConfig
from dapo_mega.planning.divisions import Division
from dapo_mega.planning.report import assumed_lines, seconds
from dapo_mega.simulation.run import SimulatedRun
from dapo_mega.simulation.schedules import Assumed, costs_of, simulated

_NUM_IN_TURNS, _NUM_SPLIT = 2, 4


@dataclass(frozen=True)
class SimulatedDivision:
    """A division in a schedule, with its `algorithm.max_staleness`."""

    division: Division
    schedule: tuple[str, int]
    run: SimulatedRun

    def overrides(self, config: RunConfig) -> list[str]:
        """What to add to `config`, as `key=value` of a command line."""
        name, staleness = self.schedule
        changed = [f"rollout.schedule={name}"] if name != config.rollout.schedule else []
        changed += [f"algorithm.max_staleness={staleness}"] if staleness != config.algorithm.max_staleness else []
        return [*changed, *self.division.overrides(config)]


def simulate_divisions(divisions: Sequence[Division], config: RunConfig, assumed: Assumed) -> list[SimulatedDivision]:
    """The best of `divisions` by plan, simulated, fastest first: two in turns, synchronous, and the four split ones
    whose slower side is fastest, asynchronous."""
    in_turns = sorted((d for d in divisions if d.plan.engine.is_colocated), key=lambda d: d.seconds)
    split = [division for division in divisions if not division.plan.engine.is_colocated]
    split.sort(key=lambda division: slower_side_s(division, assumed))
    staleness = config.algorithm.max_staleness
    chosen = [(division, ("synchronous", staleness)) for division in in_turns[:_NUM_IN_TURNS]]
    chosen += [(division, ("asynchronous", max(1, staleness))) for division in split[:_NUM_SPLIT]]
    found = [
        SimulatedDivision(division, schedule, simulated(division.plan, schedule, assumed))
        for division, schedule in chosen
    ]
    return sorted(found, key=lambda one: one.run.seconds_per_step)


def simulated_division_lines(
    found: Sequence[SimulatedDivision], num_gpus: int, config: RunConfig, assumed: Assumed
) -> Iterator[str]:
    """Lines of the simulated divisions, as overrides of `config`, and what they assume."""
    yield f"divisions of {num_gpus} GPUs between trainer and engines, simulated in their schedules, best first:"
    if not found:
        yield "  none fits; add GPUs, set compute.recompute=full, or raise --engine-tensor"
        return
    for one in found:
        plan, run, (name, staleness) = one.division.plan, one.run, one.schedule
        trainer = plan.workload.placement.world_size
        where = "in turns on all" if plan.engine.is_colocated else f"trainer {trainer} + engines {num_gpus - trainer}"
        yield (
            f"  {run.steps_per_hour:7.2f} steps/hour  {where}, {name}"
            + (f" with max_staleness {staleness}" if name == "asynchronous" else "")
            + f": {seconds(run.seconds_per_step)} s a step; {one.division.num_engines} engine(s) of tensor "
            f"{plan.engine.tensor}, training and weights {seconds(plan.time.total)} s; the trainer waits "
            f"{run.waiting_share:.0%} of the time, engines are idle {run.idle_share:.0%}"
        )
        yield f"      {' '.join(one.overrides(config)) or 'as in the file'}"
    plan = found[0].division.plan
    workload = assumed.workload(plan)
    yield (
        f"  assumed: lengths log-normal with mean {workload.mean_length:,.0f} and spread {workload.spread:.3g}, "
        f"{workload.kept_share:.0%} of the groups kept, {assumed.num_steps} steps simulated"
    )
    yield from assumed_lines(plan)


def slower_side_s(division: Division, assumed: Assumed) -> float:
    """Seconds of a step if trainer and engines never waited for each other and all places of engines were taken."""
    plan = division.plan
    costs, workload = costs_of(plan, assumed), assumed.workload(plan)
    tokens = plan.workload.responses_per_step / workload.kept_share * workload.mean_length
    return max(plan.time.total, tokens / (division.num_engines * costs.speed.tokens_per_s))
