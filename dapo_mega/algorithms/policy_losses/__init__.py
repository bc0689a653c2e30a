"""The policy losses, each a section of the configuration with its parameters and metrics.

A new kind: a file here, and its class in `PolicyLossChoice`. A user's own: `{kind: function, path: FILE.py:NAME}`.
"""

from typing import get_args

from dapo_mega.algorithms.policy_losses.base import LossInputs, PolicyLoss, TokenLosses
from dapo_mega.algorithms.policy_losses.clip import ClipLoss, GspoLoss
from dapo_mega.algorithms.policy_losses.covariance import ClipCovLoss, KlCovLoss
from dapo_mega.algorithms.policy_losses.mirror_descent import MirrorDescentLoss
from dapo_mega.algorithms.policy_losses.own import OwnLoss
from dapo_mega.algorithms.policy_losses.reinforce import CispoLoss, ReinforceLoss, ToprLoss
from dapo_mega.algorithms.policy_losses.soft_gate import SapoLoss
from dapo_mega.declared import Metric

__all__ = [
    "POLICY_LOSS_METRICS",
    "ClipCovLoss",
    "ClipLoss",
    "KlCovLoss",
    "LossInputs",
    "OwnLoss",
    "PolicyLoss",
    "PolicyLossChoice",
    "TokenLosses",
]

PolicyLossChoice = (
    ClipLoss
    | GspoLoss
    | ReinforceLoss
    | CispoLoss
    | SapoLoss
    | ToprLoss
    | MirrorDescentLoss
    | ClipCovLoss
    | KlCovLoss
    | OwnLoss
)

POLICY_LOSS_METRICS: tuple[Metric, ...] = tuple(
    {metric.name: metric for kind in get_args(PolicyLossChoice) for metric in kind.described_metrics}.values()
)
"""The catalogue's entries of all losses, each once."""
