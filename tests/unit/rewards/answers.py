"""Compares answers in the calling process, without the limits of `AnswerVerifier`."""

from collections.abc import Sequence

from dapo_mega.rewards import gold_answers
from dapo_mega.rewards.bounds import MAX_ANSWER_CHARACTERS
from dapo_mega.rewards.grading import graded, stated_truth


def answers_match(candidate: str, ground_truth: str | Sequence[str], numeric_tolerance: float = 0.0) -> bool:
    """Whether an extracted answer equals the ground truth; False for an answer that exceeds `bounds`."""
    if len(candidate) > MAX_ANSWER_CHARACTERS:
        return False
    golds = map(stated_truth, gold_answers(ground_truth))
    return any(graded(candidate, gold, numeric_tolerance) for gold in golds)
