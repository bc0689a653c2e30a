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


def test_the_texts_of_one_sum_and_one_difference() -> None:
    total = Problem(345, "+", 678)
    assert prompt_text(total) == "345+678="
    assert careful_answer(total) == "5+8=13,4+7+1=12,3+6+1=10\nAnswer: 1023"
    assert verbose_answer(total, 2) == "5+8=13,5+8=13,4+7+1=12,4+7+1=12,3+6+1=10,3+6+1=10\nAnswer: 1023"
    assert careless_answer(total, np.random.default_rng(0), forgetting=1) == "Answer: 913"
    assert careful_answer(Problem(345, "-", 78)) == "5-8+10=7,4-7-1+10=6,3-0-1=2\nAnswer: 267"


@given(problems)
def test_careful_and_verbose_answers_are_right_in_every_step(problem: Problem) -> None:
    for text in (careful_answer(problem), verbose_answer(problem)):
        assert _answer(text) == problem.answer == _value(f"{problem.left}{problem.operator}{problem.right}")
        for step in text.split("\n")[0].split(","):
            left, right = step.split("=")
            assert _value(left) == int(right)


@given(problems)
def test_the_steps_spell_the_answer(problem: Problem) -> None:
    steps = careful_answer(problem).split("\n")[0].split(",")
    results = [step.split("=")[1] for step in steps]
    spelt = results[-1] + "".join(result[-1] for result in reversed(results[:-1]))
    assert int(spelt) == problem.answer


@given(problems, st.integers(0, 1000))
def test_careless_answers_err_exactly_where_a_carry_is_forgotten(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert _answer(careless_answer(problem, rng, forgetting=0)) == problem.answer
    # A carry out of the last column is written, not remembered.
    steps = careful_answer(problem).split("\n")[0].split(",")
    carries = any(step.count(problem.operator) > 1 and f"{problem.operator}1=" in step for step in steps)
    carries |= any(f"{problem.operator}1+10=" in step for step in steps)
    assert (_answer(careless_answer(problem, rng, forgetting=1)) != problem.answer) == carries


@given(problems, st.integers(0, 1000))
def test_every_text_is_made_of_the_alphabet(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [prompt_text(problem), careful_answer(problem), verbose_answer(problem), careless_answer(problem, rng)]
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
        {"forgetting": 1.5},
        {"repeats": 0},
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
