"""Compares models by their responses to the same problems: differences, pass@k crossings, coverage, sampling gap.

The first model is the base: the others are compared with it, problem by problem.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Final, Literal

import numpy as np

from dapo_mega.errors import InputError
from dapo_mega.evaluation.matching import aligned, common_benchmarks, different_settings, paired
from dapo_mega.evaluation.measures import ProblemResponses, measure, powers_of_two
from dapo_mega.evaluation.saved import Problem, SavedEvaluation
from dapo_mega.evaluation.statistics import Estimate, Floats, estimate_means, paired_p_value, pass_at_each_k

_EDGES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Upper edges of the bins of difficulty: problems that the base never solves, up to 10 % of responses, ..."""
_NEAR: Final = 1e-9


@dataclass(frozen=True)
class Difference:
    """A model minus the base, paired by problem: the mean with its interval, the p-value of the sign-flip test, and the
    problems on which the model's value is above (`won`) and below (`lost`) the base's."""

    mean: Estimate
    p_value: float
    won: int
    lost: int


@dataclass(frozen=True)
class Crossing:
    """The curves of pass@k cross: from this k on, the model that was behind is ahead.

    `behind_before` is the model that overtakes. `last_before` and `first_after` are the largest reported k below and
    the smallest from the crossing on at which the interval of the difference excludes 0 on the side that belongs there;
    None where there is none.
    """

    k: int
    behind_before: Literal["model", "base"]
    last_before: int | None
    first_after: int | None

    @property
    def is_separated(self) -> bool:
        """Whether intervals exclude 0 on both sides of the crossing."""
        return self.last_before is not None and self.first_after is not None


@dataclass(frozen=True)
class DifficultyBin:
    """Problems of which the base solves more than `above` and at most `up_to` of its responses (both 0: none of them),
    with the mean of pass@k at the largest k and the mean success rate of each model, by label."""

    above: float
    up_to: float
    num_problems: int
    solved: dict[str, float]
    success_rate: dict[str, float]

    @property
    def name(self) -> str:
        if self.up_to == 0:
            return "never"
        return f"up to {self.up_to:.0%}" if self.above == 0 else f"{self.above:.0%} to {self.up_to:.0%}"


@dataclass(frozen=True)
class ChangedProblem:
    """A problem that one of the two models solves at least once and the other never: right responses of all."""

    index: int
    prompt: str
    ground_truth: str
    base_correct: int
    base_samples: int
    model_correct: int
    model_samples: int


@dataclass(frozen=True)
class AgainstBase:
    """One model against the base. `differences` are by measure, those of `pass@k` and `avg@k` among them.

    `sampling_gap` is Yue et al.'s sampling-efficiency gap (arXiv 2504.13837): pass@k of the base at the largest k minus
    pass@1 of the model. It is 0 for a model that gets with one response what the base gets with k.
    """

    differences: dict[str, Difference]
    crossings: tuple[Crossing, ...]
    sampling_gap: Estimate
    newly_solved: tuple[ChangedProblem, ...]
    no_longer_solved: tuple[ChangedProblem, ...]


@dataclass(frozen=True)
class BenchmarkComparison:
    """All models on one benchmark. `ks` are the k of pass@k, `num_samples` the fewest and most responses to a problem
    of each model, `measures` the estimates by label and measure, and `against_base` those of all models but the first.
    """

    name: str
    num_problems: int
    ks: tuple[int, ...]
    num_samples: dict[str, tuple[int, int]]
    measures: dict[str, dict[str, Estimate]]
    against_base: dict[str, AgainstBase]
    difficulty: tuple[DifficultyBin, ...]
    notes: tuple[str, ...]
    shared_start: str
    """What all prompts begin with, such as a template's instruction."""

    @property
    def base(self) -> str:
        return next(iter(self.measures))


def compare(
    evaluations: Sequence[SavedEvaluation],
    *,
    ks: Sequence[int] = (),
    only: Collection[str] = (),
    allowed: Collection[str] = (),
) -> list[BenchmarkComparison]:
    """One comparison per benchmark. `ks` are the k of pass@k (none: powers of two up to the fewest responses to a
    problem), `only` some benchmarks, `allowed` groups of settings that may differ. Raises InputError, in one line, for
    evaluations that cannot be compared."""
    if len(evaluations) < 2:
        raise InputError("compare needs at least two evaluations: the base first, then what was made of it")
    return [_compare(name, evaluations, ks, allowed) for name in common_benchmarks(evaluations, only)]


def _compare(
    name: str, evaluations: Sequence[SavedEvaluation], given: Sequence[int], allowed: Collection[str]
) -> BenchmarkComparison:
    notes = different_settings(name, evaluations, allowed)
    evaluations, missing = paired(name, evaluations)
    notes += missing
    problems, responses = aligned(name, evaluations, allowed)
    labels = [one.label for one in evaluations]
    sizes = {label: [problem.num_samples for problem in found] for label, found in zip(labels, responses, strict=True)}
    ranges = {label: (min(counts), max(counts)) for label, counts in sizes.items()}
    # From unequal numbers pass@k and maj@k are estimates of unequal spread, whose differences lean to one side even
    # between equal models.
    fewest = [min(found.num_samples for found in of_problem) for of_problem in zip(*responses, strict=True)]
    responses = [[found.first(count) for found, count in zip(each, fewest, strict=True)] for each in responses]
    scarcest = min(ranges, key=lambda label: ranges[label][0])
    if given and max(given) > min(fewest):
        raise InputError(
            f"{name}: --k {max(given)} is more than {scarcest} has: {min(fewest)} scored responses to a problem; give "
            f"at most {min(fewest)}"
        )
    ks = sorted(set(given)) if given else powers_of_two(min(fewest))
    if len({count for counts in sizes.values() for count in counts}) > 1:
        shown = ", ".join(f"{label} {in_words(*range_)}" for label, range_ in ranges.items())
        notes.append(
            f"responses per problem differ ({shown}): the first to each problem are compared, as many as every model "
            "has"
        )
    has_answers = all(one.benchmarks[name].has_answers for one in evaluations)
    values = [measure(found, ks, has_answers=has_answers) for found in responses]
    return BenchmarkComparison(
        name=name,
        num_problems=len(problems),
        ks=tuple(ks),
        num_samples=ranges,
        measures={label: _estimates(found) for label, found in zip(labels, values, strict=True)},
        against_base={
            label: _against_base(problems, ks, (responses[0], found), (values[0], measured))
            for label, found, measured in zip(labels[1:], responses[1:], values[1:], strict=True)
        },
        difficulty=_difficulty(labels, values, max(ks)),
        notes=tuple(notes),
        shared_start=commonprefix([problem.prompt for problem in problems])  # noqa: RUF071
        if len(problems) > 1
        else "",
    )


def in_words(low: int, high: int) -> str:
    """A range of counts."""
    return str(low) if low == high else f"{low} to {high}"


def _estimates(values: dict[str, Floats]) -> dict[str, Estimate]:
    return dict(zip(values, estimate_means(np.stack(list(values.values()))), strict=True))


def _against_base(
    problems: Sequence[Problem],
    ks: Sequence[int],
    responses: tuple[Sequence[ProblemResponses], Sequence[ProblemResponses]],
    values: tuple[dict[str, Floats], dict[str, Floats]],
) -> AgainstBase:
    """The second of each pair against the first, the base."""
    of_base, of_model = values
    paired = {name: of_model[name] - of_base[name] for name in of_base}
    differences = {
        name: Difference(
            mean, paired_p_value(paired[name]), *(int(np.sum(sign * paired[name] > _NEAR)) for sign in (1, -1))
        )
        for name, mean in _estimates(paired).items()
    }
    found = [
        ChangedProblem(
            problem.index,
            problem.prompt,
            problem.ground_truth,
            *(base.num_correct, base.num_samples, model.num_correct, model.num_samples),
        )
        for problem, base, model in zip(problems, *responses, strict=True)
    ]
    return AgainstBase(
        differences,
        _crossings(responses, ks, differences),
        estimate_means(of_base[f"pass@{max(ks)}"] - of_model[f"avg@{max(ks)}"])[0],
        tuple(problem for problem in found if not problem.base_correct and problem.model_correct),
        tuple(problem for problem in found if problem.base_correct and not problem.model_correct),
    )


def _crossings(
    responses: tuple[Sequence[ProblemResponses], Sequence[ProblemResponses]],
    ks: Sequence[int],
    differences: dict[str, Difference],
) -> tuple[Crossing, ...]:
    """Where the mean of pass@k of the model minus the base changes its sign, at any k up to the largest of `ks`."""
    base, model = (
        pass_at_each_k([p.num_samples for p in found], [p.num_correct for p in found], max(ks)).mean(axis=1)
        for found in responses
    )
    ahead = np.where(np.abs(model - base) > _NEAR, np.sign(model - base), 0)
    means = {k: differences[f"pass@{k}"].mean for k in ks}
    clear = {k: np.sign(mean.value) for k, mean in means.items() if mean.excludes_zero}
    crossings = []
    for before, after in pairwise(np.flatnonzero(ahead)):
        if ahead[before] == ahead[after]:
            continue
        k, sign = int(after) + 1, ahead[after]
        crossings.append(
            Crossing(
                k,
                "model" if sign > 0 else "base",
                max((at for at, side in clear.items() if at < k and side == -sign), default=None),
                min((at for at, side in clear.items() if at >= k and side == sign), default=None),
            )
        )
    return tuple(crossings)


def _difficulty(labels: Sequence[str], values: Sequence[dict[str, Floats]], max_k: int) -> tuple[DifficultyBin, ...]:
    rate = values[0][f"avg@{max_k}"]
    bins = []
    for above, up_to in zip((-1.0, *_EDGES), _EDGES, strict=False):
        chosen = (rate > above + _NEAR) & (rate <= up_to + _NEAR)
        if chosen.any():
            solved, success = (
                {label: float(found[name][chosen].mean()) for label, found in zip(labels, values, strict=True)}
                for name in (f"pass@{max_k}", f"avg@{max_k}")
            )
            bins.append(DifficultyBin(max(above, 0.0), up_to, int(chosen.sum()), solved, success))
    return tuple(bins)
