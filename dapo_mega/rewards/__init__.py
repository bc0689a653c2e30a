"""Rewards: answer extraction, equivalence with the ground truth, verification in bulk, reward shaping.

Texts in, numbers out. Nothing here knows tokens, groups or engines, and no text is ever evaluated as code.
"""

from dapo_mega.rewards.equivalence import answers_match, validate_ground_truth
from dapo_mega.rewards.extraction import ExtractionStyle, extract_answer, extract_ground_truth
from dapo_mega.rewards.normalization import normalize_answer
from dapo_mega.rewards.shaping import accuracy_reward, length_rewards, soft_overlong_punishment
from dapo_mega.rewards.verifier import AnswerVerifier, Outcome, Verdict

__all__ = [
    "AnswerVerifier",
    "ExtractionStyle",
    "Outcome",
    "Verdict",
    "accuracy_reward",
    "answers_match",
    "extract_answer",
    "extract_ground_truth",
    "length_rewards",
    "normalize_answer",
    "soft_overlong_punishment",
    "validate_ground_truth",
]
