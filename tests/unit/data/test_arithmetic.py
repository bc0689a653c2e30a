"""The quickstart's task: answers are right where they claim to be, and nothing held out is ever shown."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dapo_mega.data.arithmetic import (
    ALPHABET,
    ArithmeticTask,
    Problem,
    careful_answer,
    careless_answer,
    prompt_text,
    verbose_answer,
)
from dapo_mega.errors import InputError

operands = st.integers(0, 10**7)
problems = st.builds(
    lambda a, b, operator: Problem(max(a, b), "-", min(a, b)) if operator == "-" else Problem(a, "+", b),
    operands,
    operands,
    st.sampled_from("+-"),
)


def _answer(text: str) -> int:
    return int(text.rsplit("Answer: ", 1)[1])


def _value(expression: str) -> int:
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_texts_of_one_sum_and_one_difference() -> None:
    total = Problem(345, "+", 678)
    assert prompt_text(total) == "345+678="
    assert re.sub("[;, ](?=[0-9])", "|", careful_answer(total, _rng())) == "5+8+0=13|4+7+1=12|3+6+1=10\nAnswer:|1023"
    assert careless_answer(total) == "Answer: 900"
    difference = careful_answer(Problem(345, "-", 78), _rng())
    assert re.split("[;, \n]", difference) == ["5-8-0+10=07", "4-7-1+10=06", "3-0-1=02", "Answer:", "267"]


@given(problems, st.integers(0, 1000))
def test_careful_and_verbose_answers_are_right_in_every_step(problem: Problem, seed: int) -> None:
    for text in (careful_answer(problem, _rng(seed)), verbose_answer(problem, _rng(seed))):
        assert _answer(text) == problem.answer == _value(f"{problem.left}{problem.operator}{problem.right}")
        for step in re.findall(r"[0-9+-]+=[0-9]+", text):
            left, right = step.split("=")
            assert _value(left) == int(right)


@given(problems)
def test_the_steps_spell_the_answer(problem: Problem) -> None:
    results = re.findall(r"=([0-9]+)", careful_answer(problem, _rng()))
    spelt = results[-1] + "".join(result[-1] for result in reversed(results[:-1]))
    assert int(spelt) == problem.answer


@given(problems)
def test_verbose_answers_work_everything_twice(problem: Problem) -> None:
    assert verbose_answer(problem, _rng()).count("=") == 2 * careful_answer(problem, _rng()).count("=")


def test_careless_answers_are_nearly_always_wrong() -> None:
    training, _ = ArithmeticTask(min_digits=3).problems(2000, 0)
    right = sum(_answer(careless_answer(problem)) == problem.answer for problem in training)
    assert right < 0.01 * len(training)


def test_steps_are_separated_freely() -> None:
    texts = {careful_answer(Problem(345, "+", 678), _rng(seed)) for seed in range(200)}
    assert len(texts) == 9


@given(problems, st.integers(0, 1000))
def test_every_text_is_made_of_the_alphabet(problem: Problem, seed: int) -> None:
    rng = _rng(seed)
    texts = [prompt_text(problem), careful_answer(problem, rng), verbose_answer(problem, rng), careless_answer(problem)]
    assert set("".join(texts)) <= set(ALPHABET)


tasks = st.builds(
    lambda low, extra, operators, seed: ArithmeticTask(low, low + extra, tuple(operators), seed),
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(st.sampled_from("+-"), min_size=1, unique=True),
    st.integers(0, 10**6),
)


def _twins(problem: Problem) -> tuple[str, int, int]:
    return problem.operator, max(problem.left, problem.right), min(problem.left, problem.right)


@given(tasks, st.integers(0, 40), st.integers(0, 40))
def test_no_problem_and_no_commuted_twin_comes_twice(task: ArithmeticTask, num_train: int, num_eval: int) -> None:
    assume(num_train + num_eval <= task.num_distinct // 2)
    training, held_out = task.problems(num_train, num_eval)
    assert (len(training), len(held_out)) == (num_train, num_eval)
    assert len({_twins(problem) for problem in training + held_out}) == num_train + num_eval
    for problem in training + held_out:
        assert problem.operator in task.operators
        assert problem.answer >= 0
        assert all(task.min_digits <= len(str(n)) <= task.max_digits for n in (problem.left, problem.right))


@given(tasks, st.integers(1, 20), st.integers(1, 80))
def test_no_demonstration_shows_a_held_out_problem(task: ArithmeticTask, num_eval: int, num: int) -> None:
    _, held_out = task.problems(0, num_eval)
    forbidden = {_twins(problem) for problem in held_out}
    for demonstration in task.demonstrations(num, held_out):
        left, operator, right = re.fullmatch(r"(\d+)([+-])(\d+)=", demonstration.prompt).groups()
        assert _twins(Problem(int(left), operator, int(right))) not in forbidden


@given(st.integers(0, 60))
def test_the_held_out_problems_do_not_depend_on_the_training_size(num_train: int) -> None:
    task = ArithmeticTask(seed=5)
    assert task.problems(num_train, 20)[1] == task.problems(0, 20)[1]


def test_seeds_decide_everything() -> None:
    def made(seed: int) -> tuple:
        task = ArithmeticTask(seed=seed)
        training, held_out = task.problems(20, 20)
        return training, held_out, task.demonstrations(20, held_out)

    assert made(1) == made(1)
    assert all(one != other for one, other in zip(made(1), made(2), strict=True))


@given(st.integers(0, 100), st.integers(0, 10), st.integers(0, 10))
def test_qualities_are_mixed_in_their_shares(num: int, careful: int, verbose: int) -> None:
    shares = {"careful": careful / 20, "verbose": verbose / 20, "careless": 1 - (careful + verbose) / 20}
    counts = Counter(d.quality for d in ArithmeticTask().demonstrations(num, [], shares))
    assert sum(counts.values()) == num
    for quality, share in shares.items():
        assert abs(counts[quality] - share * num) <= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_digits": 0},
        {"min_digits": 4, "max_digits": 3},
        {"max_digits": 19},
        {"operators": ()},
        {"operators": ("*",)},
        {"seed": -1},
    ],
)
def test_impossible_tasks_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError):
        ArithmeticTask(**wrong)


def test_more_problems_than_there_are_is_refused_with_the_limit() -> None:
    task = ArithmeticTask(max_digits=1)
    assert task.num_distinct == 55
    assert len(task.problems(20, 7)[0]) == 20
    with pytest.raises(InputError, match="at most 27"):
        task.problems(20, 8)


@pytest.mark.parametrize("shares", [{"careful": 0.5}, {"careful": 1.5, "verbose": -0.5}, {"quick": 1.0}])
def test_shares_that_are_no_mixture_are_refused(shares: dict) -> None:
    with pytest.raises(InputError, match="shares"):
        ArithmeticTask().demonstrations(3, [], shares)
