"""What the finished runs of each arm came to, over their seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dapo_mega.ablation.arms import Arm
from dapo_mega.ablation.intervals import Estimate, estimate_difference, estimate_mean
from dapo_mega.ablation.outcomes import Outcome, records_of
from dapo_mega.ablation.plan import Plan, Run

Records = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class RunResult:
    run: Run
    outcome: Outcome
    records: Records


@dataclass(frozen=True)
class ArmResult:
    """Means over the seeds of an arm that are finished; None where no finished run recorded it.

    `before` and `after`: held-out accuracy before the first and after the last step. `cut_off`: share of the
    held-out responses that reached the limit, at the end. `versus_previous`: final accuracy
    minus that of the row before in the ladder, or of the first method, with equal seeds paired; None for the first.
    """

    arm: Arm
    runs: tuple[RunResult, ...]
    before: Estimate | None
    after: Estimate | None
    gain: Estimate | None
    versus_previous: Estimate | None
    response_length: float | None
    cut_off: float | None
    entropy: float | None
    minutes: float | None

    @property
    def finished(self) -> list[RunResult]:
        return [result for result in self.runs if result.outcome.state == "finished"]


def gather(plan: Plan, outcomes: Mapping[str, Outcome]) -> list[ArmResult]:
    """The results of all arms, in the plan's order, as far as the runs have come."""
    results: list[ArmResult] = []
    reference: tuple[RunResult, ...] = ()
    for arm in plan.arms:
        runs = tuple(RunResult(run, outcomes[run.name], records_of(run.folder)) for run in plan.of_arm(arm))
        is_first = not results or results[-1].arm.group != arm.group
        results.append(_arm_result(arm, runs, () if is_first else reference))
        if arm.group == "ladder" or is_first:
            reference = runs
    return results


def held_out(records: Records, place: int, metric: str = "evaluation/avg_at_k") -> float | None:
    """A value of the first (`place` 0) or last (-1) evaluation; None if that one has no score, as of one whose
    responses are missing: another evaluation's is no substitute."""
    evaluations = [record for record in records if any(name.startswith("evaluation/") for name in record)]
    return evaluations[place].get(metric) if evaluations else None


def _arm_result(arm: Arm, runs: tuple[RunResult, ...], reference: tuple[RunResult, ...]) -> ArmResult:
    finished = [result.records for result in runs if result.outcome.state == "finished"]
    before = [held_out(records, 0) for records in finished]
    after = [held_out(records, -1) for records in finished]
    return ArmResult(
        arm,
        runs,
        before=_estimate(before),
        after=_estimate(after),
        gain=_estimate([_minus(last, first) for last, first in zip(after, before, strict=True)]),
        versus_previous=_estimate(_paired_differences(runs, reference), estimate_difference),
        response_length=_mean_of(finished, lambda r: held_out(r, -1, "evaluation/response_length_mean")),
        cut_off=_mean_of(finished, lambda r: held_out(r, -1, "evaluation/truncated_share")),
        entropy=_mean_of(
            finished, lambda r: next((x["policy/entropy"] for x in reversed(r) if "policy/entropy" in x), None)
        ),
        minutes=_mean_of(finished, lambda r: sum(record.get("time/step_s", 0.0) for record in r) / 60),
    )


def _paired_differences(runs: Sequence[RunResult], reference: Sequence[RunResult]) -> list[float | None]:
    """Final accuracy minus that of the reference's run with the same seed."""
    final = {
        result.run.seed: held_out(result.records, -1) for result in reference if result.outcome.state == "finished"
    }
    return [
        _minus(held_out(result.records, -1), final.get(result.run.seed))
        for result in runs
        if result.outcome.state == "finished"
    ]


def _minus(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _estimate(
    values: Sequence[float | None], estimate: Callable[[Sequence[float]], Estimate] = estimate_mean
) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known) if known else None


def _mean_of(runs: Sequence[Records], value: Callable[[Records], float | None]) -> float | None:
    estimate = _estimate([value(records) for records in runs])
    return estimate.mean if estimate else None
