"""Rewards: answer extraction, equivalence with the ground truth, verification in bulk, reward shaping.

Records of responses in, numbers out. Nothing here knows groups or engines, and no text is evaluated as code outside of
`sandbox`.
Rewards of a configuration are made by `dapo_mega.rewards.build`, which is not imported here: workers stay light.
"""

from dapo_mega.rewards.built_in import accuracy_reward, length_rewards, soft_overlong_punishment
from dapo_mega.rewards.composed import ComposedReward, WeightedReward
from dapo_mega.rewards.equivalence import same_answer, validate_ground_truth
from dapo_mega.rewards.extraction import extract_answer, extract_ground_truth
from dapo_mega.rewards.grading import gold_answers
from dapo_mega.rewards.records import RewardRecord, Score, ScoringFailure
from dapo_mega.rewards.verifier import AnswerVerifier, Verdict
