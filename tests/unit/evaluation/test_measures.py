"""The values of an evaluation's problems, against counting by hand."""

import pytest

from dapo_mega.evaluation.measures import ProblemResponses, measure, powers_of_two

EASY = ProblemResponses([True, True, False, True], ["2", "2.0", None, "2"], [4, 4, 8, 4], [False, False, True, False])
HARD = ProblemResponses([False, True, False, False], ["1/2", "3", "0.5", "7"], [8, 8, 8, 16], [False] * 4)


def test_every_measure_is_a_value_per_problem():
    measured = {name: values.tolist() for name, values in measure([EASY, HARD], [1, 2, 4]).items()}
    assert measured == {
        "avg@4": [0.75, 0.25],
        "pass@1": pytest.approx([0.75, 0.25]),
        "pass@2": pytest.approx([1.0, 0.5]),
        "pass@4": [1.0, 1.0],
        # Of the hard one, 1/2 and 0.5 outvote the right answer.
        "maj@4": [1.0, 0.0],
        "length": [5.0, 10.0],
        "truncated": [0.25, 0.0],
        "no_answer": [0.25, 0.0],
    }


def test_without_answers_nothing_is_said_of_them():
    assert not {"maj@1", "no_answer"} & measure([EASY], [1], has_answers=False).keys()


def test_a_k_above_the_responses_of_a_problem_and_no_problem_are_refused():
    with pytest.raises(ValueError, match="k=8 must be between 1 and the number of samples 4"):
        measure([EASY], [8])
    with pytest.raises(ValueError, match="at least one problem"):
        measure([], [1])


def test_the_reported_k_are_powers_of_two_and_the_largest():
    assert [powers_of_two(k) for k in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]
