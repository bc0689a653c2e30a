"""The policy losses, each a section of the configuration with its parameters and metrics.

A new kind: a file here with a class, and its name in the first import. A user's own needs nothing here: `{kind:
function, path: FILE.py:NAME}`.
"""

from inspect import isclass, ismodule
from typing import TYPE_CHECKING, Union

from dapo_mega.algorithms.policy_losses import base, clip, covariance, mirror_descent, own, reinforce, soft_gate
from dapo_mega.algorithms.policy_losses.base import LossInputs, LossNeed, PolicyLoss, TokenLosses
from dapo_mega.algorithms.policy_losses.clip import ClipLoss
from dapo_mega.algorithms.policy_losses.covariance import ClipCovLoss, KlCovLoss
from dapo_mega.algorithms.policy_losses.own import OwnLoss
from dapo_mega.declared import Metric

__all__ = [
    "POLICY_LOSS_METRICS",
    "ClipCovLoss",
    "ClipLoss",
    "KlCovLoss",
    "LossInputs",
    "LossNeed",
    "OwnLoss",
    "PolicyLoss",
    "PolicyLossChoice",
    "TokenLosses",
]

_FOUND = (
    kind
    for file in [*vars().values()]
    if ismodule(file) and file is not base
    for kind in vars(file).values()
    if isclass(kind) and issubclass(kind, PolicyLoss) and kind.__module__ == file.__name__
)
_KINDS = tuple(sorted(_FOUND, key=lambda kind: kind is OwnLoss))  # As they are imported, the user's own last.

if TYPE_CHECKING:
    PolicyLossChoice = PolicyLoss
else:
    PolicyLossChoice = Union[_KINDS]  # noqa: UP007
"""A section of any kind."""

POLICY_LOSS_METRICS: tuple[Metric, ...] = tuple(
    {metric.name: metric for kind in _KINDS for metric in kind.described_metrics}.values()
)
"""The catalogue's entries of all losses, each once."""
