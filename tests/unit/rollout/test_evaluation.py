import itertools

import pytest

from dapo_mega.rollout.evaluation import majority_is_correct, pass_at_k
from dapo_mega.types import ScoredResponse


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 2), (4, 1, 4)])
def test_pass_at_k_equals_the_share_of_draws_that_hold_a_correct_sample(n, c, k):
    samples = [True] * c + [False] * (n - c)
    draws = list(itertools.combinations(samples, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_at_k_refuses_more_draws_than_samples():
    with pytest.raises(ValueError, match="between 1 and the number of samples 3"):
        pass_at_k(3, 1, 4)


def scored(*answers):
    return [ScoredResponse(None, "", answer == "42", 0.0, 0.0, answer) for answer in answers]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["42", "42", "7"], True),
        (["7", "7", "42"], False),
        ([None, None, "42"], True),
        ([None, None], False),
        (["42", "7"], True),
    ],
)
def test_the_majority_of_given_answers_decides(answers, expected):
    assert majority_is_correct(scored(*answers)) is expected
