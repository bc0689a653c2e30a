"""What is measured of an evaluation: a value per problem of avg@k, pass@k, maj@k, length, truncation and no answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dapo_mega.evaluation.statistics import Floats, pass_at_each_k
from dapo_mega.evaluation.voting import count_votes, maj_at_k


@dataclass(frozen=True)
class ProblemResponses:
    """The scored responses to one problem, at least one: verdicts, answers (None: none was found), lengths in tokens,
    and which were cut off by the response limit."""

    correct: Sequence[bool]
    answers: Sequence[str | None]
    lengths: Sequence[int]
    truncated: Sequence[bool]

    @property
    def num_samples(self) -> int:
        return len(self.correct)

    @property
    def num_correct(self) -> int:
        return sum(self.correct)

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Self | None:
        """The responses in rows of a file of samples; None if none of them was judged. Responses that were not judged
        are left out, as in the metrics of a run."""
        judged = [row for row in rows if row["correct"] is not None]
        if not judged:
            return None
        return cls(
            [row["correct"] for row in judged],
            [row["answer"] for row in judged],
            [row["length"] for row in judged],
            [row["finish_reason"] == "length" for row in judged],
        )

    def first(self, count: int) -> Self:
        """The first `count` of them."""
        return type(self)(self.correct[:count], self.answers[:count], self.lengths[:count], self.truncated[:count])


def powers_of_two(max_k: int) -> list[int]:
    """1, 2, 4, ... below `max_k`, and `max_k`: the k at which pass@k is reported."""
    return [2**i for i in range(max_k.bit_length()) if 2**i < max_k] + [max_k]


def measure(problems: Sequence[ProblemResponses], ks: Sequence[int], *, has_answers: bool = True) -> dict[str, Floats]:
    """The value [P] of each measure for each problem, whose means over problems are what is reported.

    `avg@k` is the share of right responses, of all that there are; `pass@k` is there for each of `ks`, `avg@k` and
    `maj@k` for the largest; `length` is in tokens; `truncated` and `no_answer` are shares. Without
    `has_answers`, which is so where the grader reads none, `maj@k` and `no_answer` are left out. Raises ValueError for
    no problem and for a k above the responses of one.
    """
    if not problems or not ks:
        raise ValueError("nothing to measure: there must be at least one problem and one k")
    sizes = np.array([problem.num_samples for problem in problems])
    right = np.array([problem.num_correct for problem in problems])
    curve = pass_at_each_k(sizes, right, max(ks))
    values = {f"avg@{max(ks)}": np.asarray(right / sizes, np.float64)}
    values |= {f"pass@{k}": curve[k - 1] for k in ks}
    if has_answers:
        votes = [count_votes(problem.answers, problem.correct) for problem in problems]
        values[f"maj@{max(ks)}"] = np.array([maj_at_k(vote, max(ks)) for vote in votes])
    values["length"] = np.array([np.mean(problem.lengths) for problem in problems])
    values["truncated"] = np.array([np.mean(problem.truncated) for problem in problems])
    if has_answers:
        values["no_answer"] = np.array([np.mean([not answer for answer in problem.answers]) for problem in problems])
    return values
