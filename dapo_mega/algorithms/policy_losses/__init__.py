"""The policy losses by kind. A new kind needs a file here, a line in `POLICY_LOSSES` and its name in
`config.algorithm.PolicyLossKind`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import get_args

from dapo_mega.algorithms.policy_losses.clip import ClippedLoss
from dapo_mega.algorithms.policy_losses.covariance import ClipCovLoss, KlCovLoss
from dapo_mega.algorithms.policy_losses.mirror_descent import MirrorDescentLoss
from dapo_mega.algorithms.policy_losses.own import OwnPolicyLoss
from dapo_mega.algorithms.policy_losses.protocol import LossInputs, PolicyLoss, TokenLosses
from dapo_mega.algorithms.policy_losses.reinforce import ClippedImportanceLoss, ReinforceLoss, TaperedLoss
from dapo_mega.algorithms.policy_losses.sequence_clip import SequenceClippedLoss
from dapo_mega.algorithms.policy_losses.soft_gate import SoftGateLoss
from dapo_mega.config import OwnLoss, PolicyLossKind

POLICY_LOSSES: Mapping[PolicyLossKind, PolicyLoss] = {
    "clip": ClippedLoss(),
    "gspo": SequenceClippedLoss(),
    "reinforce": ReinforceLoss(),
    "cispo": ClippedImportanceLoss(),
    "sapo": SoftGateLoss(),
    "topr": TaperedLoss(),
    "mirror_descent": MirrorDescentLoss(),
    "clip_cov": ClipCovLoss(),
    "kl_cov": KlCovLoss(),
}
assert POLICY_LOSSES.keys() == set(get_args(PolicyLossKind))


def policy_loss(kind: PolicyLossKind | OwnLoss) -> PolicyLoss:
    """The loss of this kind. Code of the user's own is loaded and tried once in a process. Raises InputError if it
    cannot be used."""
    return POLICY_LOSSES[kind] if isinstance(kind, str) else _own(kind.model_dump_json())


def forget() -> None:
    """Load code of the user's own anew when it is asked for next."""
    _own.cache_clear()


@cache
def _own(section: str) -> OwnPolicyLoss:
    return OwnPolicyLoss(OwnLoss(**json.loads(section)))


__all__ = ["POLICY_LOSSES", "LossInputs", "OwnPolicyLoss", "PolicyLoss", "TokenLosses", "policy_loss"]
