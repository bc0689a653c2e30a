"""maj@k: which answers vote together, and what a subset of responses would have decided."""

import itertools
from collections import Counter

import pytest

from dapo_mega.evaluation.voting import Votes, count_votes, maj_at_k


def votes(*answers, right=("42",)):
    return count_votes(answers, [answer in right for answer in answers])


def test_equal_answers_vote_together_however_they_are_spelt():
    assert votes("1/2", "0.5", r"\frac{1}{2}", "3", "3.0", "42") == Votes(6, 1, (3, 2))
    assert votes("x^2+2x+1", "(x+1)^2", r"\{1,2\}", r"\{2,1\}") == Votes(4, 0, (2, 2))
    # Only one of the two directions of comparing sees that these are equal.
    assert votes("-1", "-1", r"e^{i\pi}") == Votes(3, 0, (3,))


def test_right_answers_are_one_class_whatever_they_look_like():
    assert votes("6*7", "42", "41", right=("6*7", "42")) == Votes(3, 2, (1,))


def test_a_response_without_an_answer_does_not_vote_even_if_it_was_judged_right():
    assert count_votes([None, "", "7"], [True, False, False]) == Votes(3, 0, (1,))


def test_the_order_of_responses_does_not_matter():
    # 28% equals 28 and 0.28, which do not equal one another.
    answers = ["28", "0.28", "28%", "28", "7"]
    assert {votes(*order) for order in itertools.permutations(answers)} == {Votes(5, 0, (3, 1, 1))}


def test_hostile_answers_are_compared_by_their_spelling():
    tower, long = "9^{9^{9^{9}}}", "1" * 5000
    assert votes(tower, tower, long, long, long + ".0", "{" * 200) == Votes(6, 0, (2, 2, 1, 1))


def test_answers_without_a_value_equal_only_their_own_spelling():
    without = ["1/0", "2/0", "f(0)", "f(1)", "0^0", "1/2x", "1/3x", r"\ln(0)", r"\ln(0)/x", "x+", "3!!", "2^{x^{900}}"]
    equal = [r"\sqrt{8}", r"2\sqrt{2}", "x/2", "0.5x", "e^{i\\pi}+x", "x-1"]
    expected = Votes(18, 0, (2, 2, 2, *[1] * 12))
    for _ in range(2):
        assert votes(*without, *equal) == votes(*reversed(equal), *reversed(without)) == expected


def test_the_most_frequent_answer_decides_and_ties_count_fractionally():
    for answers, expected in (
        (["42", "42", "7"], 1),
        (["7", "7", "42"], 0),
        (["42", "7"], 0.5),
        (["42", "7", "8"], 1 / 3),
        (["42", "7", "7", "42", "8", None], 0.5),
        ([None, None, "42"], 1),
        (["", "", "42"], 1),
        ([None, None], 0),
    ):
        found = votes(*answers)
        assert maj_at_k(found, len(answers)) == pytest.approx(expected), answers


def expectation_over_subsets(answers, k):
    total, subsets = 0.0, list(itertools.combinations(answers, k))
    for subset in subsets:
        counts = Counter(answer for answer in subset if answer)
        most = [answer for answer, count in counts.items() if count == max(counts.values())]
        total += "42" in most and 1 / len(most)
    return total / len(subsets)


def test_maj_at_k_of_fewer_responses_is_the_expectation_over_subsets():
    answers = ["42"] * 4 + ["7"] * 3 + ["8"] * 2 + [None] * 2
    found = votes(*answers)
    for k, tolerance in ((1, 1e-12), (2, 0.03), (3, 0.03), (5, 0.03), (10, 0.03), (11, 1e-12)):
        assert maj_at_k(found, k) == pytest.approx(expectation_over_subsets(answers, k), abs=tolerance), k
    assert maj_at_k(found, 5) == maj_at_k(found, 5)


def test_more_voters_than_responses_are_refused():
    with pytest.raises(ValueError, match="k=3 must be between 1 and the number of samples 2"):
        maj_at_k(votes("42", "7"), 3)
