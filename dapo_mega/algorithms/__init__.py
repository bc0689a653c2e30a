"""Advantages, losses and aggregation of the policy-gradient family, as pure functions of tensors."""

from dapo_mega.algorithms.advantages import group_advantages
from dapo_mega.algorithms.aggregation import response_weight
from dapo_mega.algorithms.losses import (
    PolicyLossTerms,
    importance_weights,
    kl_estimate,
    policy_loss,
    segment_sums,
    within_bounds,
)

__all__ = [
    "PolicyLossTerms",
    "group_advantages",
    "importance_weights",
    "kl_estimate",
    "policy_loss",
    "response_weight",
    "segment_sums",
    "within_bounds",
]
