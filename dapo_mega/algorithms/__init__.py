"""Advantages, losses and aggregation of the policy-gradient family, as pure functions of tensors.

No processes, no model, no state: every number can be computed by hand.
"""

from dapo_mega.algorithms.advantages import VARIANCE_FLOOR, are_equal, group_advantages, whitened
from dapo_mega.algorithms.aggregation import response_weight
from dapo_mega.algorithms.entropy_control import EntropyControl
from dapo_mega.algorithms.ratios import (
    effective_share,
    importance_weights,
    kl_estimate,
    mean_over,
    means_over,
    segment_sums,
    sequence_importance_weights,
    within_bounds,
)
from dapo_mega.algorithms.value_loss import explained_variance, value_loss

__all__ = [
    "VARIANCE_FLOOR",
    "EntropyControl",
    "are_equal",
    "effective_share",
    "explained_variance",
    "group_advantages",
    "importance_weights",
    "kl_estimate",
    "mean_over",
    "means_over",
    "response_weight",
    "segment_sums",
    "sequence_importance_weights",
    "value_loss",
    "whitened",
    "within_bounds",
]
