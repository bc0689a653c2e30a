"""Advantages, losses and aggregation of the policy-gradient family, as pure functions of tensors."""

from dapo_mega.algorithms.advantages import group_advantages
from dapo_mega.algorithms.aggregation import response_weight
from dapo_mega.algorithms.losses import PolicyLossTerms, kl_estimate, policy_loss

__all__ = ["PolicyLossTerms", "group_advantages", "kl_estimate", "policy_loss", "response_weight"]
