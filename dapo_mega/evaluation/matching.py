"""Whether saved evaluations may be compared: the same problems, asked, judged and sampled in the same way."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.evaluation.measures import ProblemResponses
from dapo_mega.evaluation.saved import Problem, SavedBenchmark, SavedEvaluation
from dapo_mega.evaluation.settings import GROUPS

_MAX_SHOWN = 60


def common_benchmarks(evaluations: Sequence[SavedEvaluation], only: Collection[str] = ()) -> list[str]:
    """The benchmarks to compare, in the order of the first evaluation; `only` chooses some. Raises InputError unless
    every evaluation has each."""
    wanted = list(only) or list(dict.fromkeys(name for one in evaluations for name in one.benchmarks))
    for name in wanted:
        absent = [one.label for one in evaluations if name not in one.benchmarks]
        if absent:
            there = "; ".join(f"{one.label}: {', '.join(sorted(one.benchmarks))}" for one in evaluations)
            raise InputError(
                f"{absent[0]} has no evaluation of {name!r} ({there}); --only compares the benchmarks that all have"
            )
    return wanted


def different_settings(name: str, evaluations: Sequence[SavedEvaluation], allowed: Collection[str]) -> list[str]:
    """Notes on what differs and was allowed to, or is not known. Raises InputError for any other difference in the
    settings of the benchmark `name`; `allowed` are names of `GROUPS`."""
    known = [one for one in evaluations if one.benchmarks[name].settings]
    notes = [
        f"{one.label} does not say its settings: only its problems and prompts were checked"
        for one in evaluations
        if one not in known
    ]
    for group, keys in GROUPS.items():
        for key in keys:
            for other in known[1:]:
                values = [one.benchmarks[name].settings.get(key) for one in (known[0], other)]
                if values[0] == values[1]:
                    continue
                difference = (
                    f"different {group}: {known[0].label} has {key}={_shown(values[0])}, "
                    f"{other.label} has {key}={_shown(values[1])}"
                )
                if group not in allowed:
                    raise InputError(f"{name}: {difference}; --allow-different {group} compares them nevertheless")
                notes.append(difference)
    return notes


def paired(name: str, evaluations: Sequence[SavedEvaluation]) -> tuple[list[SavedEvaluation], list[str]]:
    """The evaluations without the problems of the benchmark `name` that one of them has no scored response to, and
    notes on what is missing. Problems that an evaluation lacks for another reason stay."""
    found = [one.benchmarks[name] for one in evaluations]
    if not any(benchmark.num_missing for benchmark in found):
        return list(evaluations), []
    # By prompt and ground truth, or where the same problems are asked in other words by number.
    keys: list[dict[Problem, Any]]
    for by_text in (True, False):
        keys = [
            {one: (one.prompt, one.ground_truth) if by_text else one.index for one in benchmark.responses}
            for benchmark in found
        ]
        sets = [set(known.values()) for known in keys]
        num_known, common = len(set.union(*sets)), set.intersection(*sets)
        lost = [benchmark.num_asked - len(benchmark.responses) for benchmark in found]
        if common and all(num_known - len(known) <= absent for known, absent in zip(sets, lost, strict=True)):
            break
    else:
        return list(evaluations), []
    notes, kept = [], []
    for one, benchmark, known, absent in zip(evaluations, found, keys, lost, strict=True):
        if benchmark.num_missing:
            notes.append(
                f"{one.label} lacks {benchmark.num_missing} responses that could not be had or scored, and with them "
                f"{absent} of {benchmark.num_asked} problems; compared are the {len(common)} problems that all have"
            )
        responses = {problem: given for problem, given in benchmark.responses.items() if known[problem] in common}
        kept.append(replace(one, benchmarks={name: replace(benchmark, responses=responses)}))
    return kept, notes


def aligned(
    name: str, evaluations: Sequence[SavedEvaluation], allowed: Collection[str]
) -> tuple[list[Problem], list[list[ProblemResponses]]]:
    """The problems as the first evaluation has them, and every evaluation's responses to them in their order. Raises
    InputError for different problems, ground truths, or prompts of the same problems."""
    problems = list(evaluations[0].benchmarks[name].responses)
    places = [_places(name, evaluations[0], one, allowed) for one in evaluations]
    return problems, [[by_problem[problem] for problem in problems] for by_problem in places]


def _places(
    name: str, first: SavedEvaluation, other: SavedEvaluation, allowed: Collection[str]
) -> dict[Problem, ProblemResponses]:
    """The responses of `other` by the problems of `first`."""
    ours, theirs = first.benchmarks[name], other.benchmarks[name]
    by_prompt = {(problem.prompt, problem.ground_truth): problem for problem in theirs.responses}
    wanted = {(problem.prompt, problem.ground_truth): problem for problem in ours.responses}
    if by_prompt.keys() == wanted.keys() and len(wanted) == len(ours.responses):
        return {wanted[key]: theirs.responses[problem] for key, problem in by_prompt.items()}
    by_index = {problem.index: problem for problem in theirs.responses}
    pairs = [(problem, by_index[problem.index]) for problem in ours.responses if problem.index in by_index]
    changed = [(mine, their) for mine, their in pairs if mine != their]
    if len(pairs) == len(ours.responses) == len(theirs.responses):
        if all(mine.ground_truth == their.ground_truth for mine, their in changed):
            if changed and "template" not in allowed:
                prompts = [problem.prompt for problem in changed[0]]
                start = max(len(commonprefix(prompts)) - _MAX_SHOWN // 3, 0)  # noqa: RUF071
                shown = [_shown(prompt[start:]) for prompt in prompts]
                raise InputError(
                    f"{name}: different template: {first.label} asks {shown[0]}, {other.label} asks {shown[1]}; "
                    "--allow-different template compares them nevertheless"
                )
            return {mine: theirs.responses[their] for mine, their in pairs}
        for mine, their in changed:
            if mine.prompt == their.prompt:
                raise InputError(
                    f"{name}: different ground truths: the answer of {_shown(mine.prompt)} is "
                    f"{_shown(mine.ground_truth)} in {first.label}, {_shown(their.ground_truth)} in {other.label}"
                )
    raise InputError(f"{name}: different problem sets: {_difference(first.label, ours, other.label, theirs)}")


def _difference(our_label: str, ours: SavedBenchmark, their_label: str, theirs: SavedBenchmark) -> str:
    prompts = [{problem.prompt for problem in one.responses} for one in (ours, theirs)]
    sentences = [
        f"only {label} has {len(only)} of the problems ({_shown(min(only))}{', ...' if len(only) > 1 else ''})"
        for label, only in ((our_label, prompts[0] - prompts[1]), (their_label, prompts[1] - prompts[0]))
        if only
    ]
    return "; ".join(sentences) or f"{our_label} and {their_label} hold other answers to the same prompts"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
