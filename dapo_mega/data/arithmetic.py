r"""The quickstart's task: integer arithmetic that a tiny model can learn to do step by step.

Every text of the task is written by the functions under "Texts" and nowhere else. A problem is `345+678=`. Its
careful answer works from the least significant digit, always writing the carry and two digits of result:
`5+8+0=13;4+7+1=12,3+6+1=10\nAnswer: 1023`. How the steps are separated is free, so an honest model of these texts
keeps some entropy. A careless answer is a rough estimate, nearly always wrong (`Answer: 900`); a verbose one works
everything twice and is too long for the quickstart's limit. A model that imitates a mixture of these has something
to learn from rewards: that the careful way is the right one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from dapo_mega.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

Operator = Literal["+", "-"]
Quality = Literal["careful", "verbose", "careless"]

OPERATORS: tuple[Operator, ...] = get_args(Operator)
QUALITIES: tuple[Quality, ...] = get_args(Quality)
ALPHABET = "0123456789+-=,;\n Answer:gai"
"""Every character that a problem or an answer of this task can hold."""

DEFAULT_SHARES: Mapping[Quality, float] = MappingProxyType({"careful": 0.25, "verbose": 0.08, "careless": 0.67})
SEPARATORS = (";", ",", " ")
MAX_DIGITS = 18

_EVALUATION_STREAM, _TRAINING_STREAM, _DEMONSTRATION_STREAM = range(3)


@dataclass(frozen=True, order=True)
class Problem:
    """`left` operator `right`, with left >= right for differences, so that no answer is negative."""

    left: int
    operator: Operator
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operator == "+" else self.left - self.right


@dataclass(frozen=True)
class ArithmeticDemonstration:
    """A response to imitate, as text, and the way in which it answers."""

    prompt: str
    response: str
    quality: Quality


@dataclass(frozen=True)
class ArithmeticTask:
    """Which problems are asked, and how the demonstrations of the cold start answer them.

    Operands have `min_digits` to `max_digits` digits, every count equally likely. All randomness is from `seed`.
    """

    min_digits: int = 1
    max_digits: int = 3
    operators: tuple[Operator, ...] = ("+",)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.max_digits <= MAX_DIGITS:
            raise InputError(
                f"operands of {self.min_digits} to {self.max_digits} digits: the two must be in order and lie in "
                f"1..{MAX_DIGITS}"
            )
        if not self.operators or any(operator not in OPERATORS for operator in self.operators):
            raise InputError(f"operators {self.operators}: choose one or more of {', '.join(OPERATORS)}")
        if self.seed < 0:
            raise InputError(f"seed={self.seed} is negative; give 0 or more")

    @property
    def num_distinct(self) -> int:
        """How many different problems there are; a sum and its commuted twin count once."""
        smallest = 0 if self.min_digits == 1 else 10 ** (self.min_digits - 1)
        num_operands = 10**self.max_digits - smallest
        return len(set(self.operators)) * num_operands * (num_operands + 1) // 2

    def problems(self, num_train: int, num_eval: int) -> tuple[list[Problem], list[Problem]]:
        """Training and held-out problems: all distinct, and no training sum is a held-out one commuted.

        The held-out problems depend on `num_eval` and the seed only. Raises `InputError` when more than half of
        all problems are asked for.
        """
        if min(num_train, num_eval) < 0 or num_train + num_eval > self.num_distinct // 2:
            raise InputError(
                f"{num_train} + {num_eval} problems asked for; {self.max_digits} digits and {len(self.operators)} "
                f"operators allow at most {self.num_distinct // 2} (half of all), so use more digits or fewer problems"
            )
        held_out = self._distinct(num_eval, _EVALUATION_STREAM, excluded=set())
        training = self._distinct(num_train, _TRAINING_STREAM, excluded={_identity(p) for p in held_out})
        return training, held_out

    def demonstrations(
        self, num: int, held_out: list[Problem], shares: Mapping[Quality, float] = DEFAULT_SHARES
    ) -> list[ArithmeticDemonstration]:
        """`num` demonstrations in random order, of problems that are not held out, mixed as `shares` says.

        Problems may occur more than once. Raises `InputError` when the shares do not add up to 1.
        """
        if any(quality not in QUALITIES or share < 0 for quality, share in shares.items()) or not np.isclose(
            sum(shares.values()), 1
        ):
            raise InputError(f"shares {dict(shares)} must be 0 or more, of {', '.join(QUALITIES)}, with sum 1")
        rng = self._rng(_DEMONSTRATION_STREAM)
        problems = self._endless(rng, excluded={_identity(problem) for problem in held_out})
        answers: Mapping[Quality, Callable[[Problem, np.random.Generator], str]] = {
            "careful": careful_answer,
            "verbose": verbose_answer,
            "careless": lambda problem, _: careless_answer(problem),
        }
        demonstrations = []
        for quality in _mixture(num, shares, rng):
            problem = next(problems)
            demonstrations.append(
                ArithmeticDemonstration(prompt_text(problem), answers[quality](problem, rng), quality)
            )
        return demonstrations

    def _distinct(self, num: int, stream: int, excluded: set[Problem]) -> list[Problem]:
        seen = set(excluded)
        chosen: list[Problem] = []
        problems = self._endless(self._rng(stream), excluded=set())
        while len(chosen) < num:
            problem = next(problems)
            if _identity(problem) not in seen:
                seen.add(_identity(problem))
                chosen.append(problem)
        return chosen

    def _endless(self, rng: np.random.Generator, excluded: set[Problem]) -> Iterator[Problem]:
        while True:
            operator = self.operators[int(rng.integers(len(self.operators)))]
            left, right = self._operand(rng), self._operand(rng)
            if operator == "-" and left < right:
                left, right = right, left
            problem = Problem(left, operator, right)
            if _identity(problem) not in excluded:
                yield problem

    def _operand(self, rng: np.random.Generator) -> int:
        digits = int(rng.integers(self.min_digits, self.max_digits + 1))
        return int(rng.integers(0 if digits == 1 else 10 ** (digits - 1), 10**digits))

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, stream])))


def _identity(problem: Problem) -> Problem:
    """The same problem for both orders of a sum."""
    if problem.operator == "+" and problem.left < problem.right:
        return Problem(problem.right, "+", problem.left)
    return problem


def _mixture(num: int, shares: Mapping[Quality, float], rng: np.random.Generator) -> list[Quality]:
    """`num` qualities in random order; each count is within one of its share."""
    bounds = np.rint(np.cumsum(list(shares.values())) * num).astype(int)
    counts = np.diff(bounds, prepend=0)
    qualities = [quality for quality, count in zip(shares, counts, strict=True) for _ in range(count)]
    return [qualities[i] for i in rng.permutation(num)]


# Texts ---------------------------------------------------------------------------------------------------------------


def prompt_text(problem: Problem) -> str:
    return f"{problem.left}{problem.operator}{problem.right}="


def careful_answer(problem: Problem, rng: np.random.Generator) -> str:
    """Digit by digit with every carry or borrow written out, then the right answer."""
    return f"{_work(problem, rng)}\nAnswer: {problem.answer}"


def verbose_answer(problem: Problem, rng: np.random.Generator) -> str:
    """The work done twice, then the right answer."""
    return f"{_work(problem, rng)}\nAgain: {_work(problem, rng)}\nAnswer: {problem.answer}"


def careless_answer(problem: Problem) -> str:
    """An estimate from the leading digits alone: both operands rounded down to the larger one's leading place."""
    unit = 10 ** (len(str(max(problem.left, problem.right))) - 1)
    estimate = Problem(problem.left // unit, problem.operator, problem.right // unit).answer * unit
    return f"Answer: {estimate}"


def _work(problem: Problem, rng: np.random.Generator) -> str:
    """The steps of column arithmetic, e.g. `5+8+0=13;4+7+1=12`: digit, digit, carry, two digits of result.

    A difference borrows: `5-8-0+10=07`. Steps are separated by one of three characters, drawn for each gap.
    """
    columns = list(zip_longest(reversed(str(problem.left)), reversed(str(problem.right)), fillvalue="0"))
    text, carry = "", 0
    for place, (left, right) in enumerate(columns):
        sign = 1 if problem.operator == "+" else -1
        value = int(left) + sign * (int(right) + carry)
        borrowed = value < 0
        value += 10 * borrowed
        separator = SEPARATORS[int(rng.integers(len(SEPARATORS)))] if place else ""
        borrow = "+10" if borrowed else ""
        text += f"{separator}{left}{problem.operator}{right}{problem.operator}{carry}{borrow}={value:02d}"
        carry = int(borrowed or value >= 10)
    return text


def problem_table(problems: Sequence[Problem]) -> "pa.Table":
    """The columns of DAPO-Math-17k, with their types; the prompt is the bare problem (template as_is)."""
    import pyarrow as pa

    schema = pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(pa.field("element", pa.struct({"content": pa.string(), "role": pa.string()}))),
            "ability": pa.string(),
            "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
            "extra_info": pa.struct({"index": pa.int64(), "raw_problem": pa.string(), "split": pa.null()}),
        }
    )
    records = [
        {
            "data_source": "arithmetic",
            "prompt": [{"content": prompt_text(problem), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(problem.answer), "style": "rule"},
            "extra_info": {"index": index, "raw_problem": prompt_text(problem), "split": None},
        }
        for index, problem in enumerate(problems)
    ]
    return pa.Table.from_pylist(records, schema=schema)


def demonstration_table(demonstrations: Sequence[ArithmeticDemonstration]) -> "pa.Table":
    """Columns prompt, response and quality."""
    import pyarrow as pa

    schema = pa.schema({"prompt": pa.string(), "response": pa.string(), "quality": pa.string()})
    return pa.Table.from_pylist([vars(demonstration) for demonstration in demonstrations], schema=schema)
