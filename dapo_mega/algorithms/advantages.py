"""Advantages from the rewards of one group of responses to the same prompt, each a section of the configuration."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dapo_mega.algorithms.made_up import made_up_groups
from dapo_mega.algorithms.own import OwnCode
from dapo_mega.declared import Section
from dapo_mega.types import Group

Floats = npt.NDArray[np.float64]

VARIANCE_FLOOR = 1e-8
"""Added to a variance before its root divides, as in the public code of PPO's relatives: rounding must not become a
signal of full strength."""
_TOLERANCE = 4 * float(np.finfo(np.float32).eps)


def are_equal(scores: npt.ArrayLike) -> bool:
    """Whether scores, of which there is at least one, differ by no more than rounding in float32: by 5e-7, relative to
    the largest one if that is above 1."""
    values = np.asarray(scores, dtype=np.float64)
    return bool(np.ptp(values) <= _TOLERANCE * max(1.0, float(np.abs(values).max())))


class Advantage(Section):
    """One way to make advantages of the rewards of a group, with its parameters."""

    kind: str

    compares_group: ClassVar[bool] = False
    """Whether it compares the responses of a group, of which there must be two or more."""
    has_greedy: ClassVar[bool] = False
    """Whether it needs one more response, sampled greedily and never trained on."""
    uses_critic: ClassVar[bool] = False
    """Whether a critic's values make the advantages of tokens."""

    def of_group(self, rewards: npt.ArrayLike, group: Group | None = None) -> Floats:
        """One advantage per trajectory, [G] float64, from `rewards` [G], which have the KL penalty taken off; all
        tokens of a trajectory share it. Rewards that are equal up to rounding give exact zeros where the group is the
        baseline. Raises ValueError for non-finite rewards, and for fewer than two where responses are compared."""
        values = np.asarray(rewards, dtype=np.float64)
        fewest = 2 if self.compares_group else 1
        if values.ndim != 1 or values.size < fewest:
            raise ValueError(
                f"rewards must be one-dimensional with at least {fewest} entries, got shape {values.shape}"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"rewards must be finite, got {values.tolist()}")
        if self.compares_group and are_equal(values):
            return np.zeros_like(values)
        return self._of(values, group)

    def _of(self, rewards: Floats, group: Group | None) -> Floats:
        """`of_group` of finite rewards, which differ where responses are compared."""
        return rewards.copy()


class GroupNormAdvantage(Advantage):
    """(R - mean) / (std + 1e-6) with the unbiased std (DAPO eq. 9, as in its public code)."""

    kind: Literal["group_norm"] = "group_norm"

    compares_group: ClassVar[bool] = True

    def _of(self, rewards: Floats, group: Group | None) -> Floats:
        return np.asarray((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))


class GroupMeanAdvantage(Advantage):
    """R - mean (Dr. GRPO)."""

    kind: Literal["group_mean"] = "group_mean"

    compares_group: ClassVar[bool] = True

    def _of(self, rewards: Floats, group: Group | None) -> Floats:
        return np.asarray(rewards - rewards.mean())


class LeaveOneOutAdvantage(Advantage):
    """R - mean of the other responses (RLOO)."""

    kind: Literal["leave_one_out"] = "leave_one_out"

    compares_group: ClassVar[bool] = True

    def _of(self, rewards: Floats, group: Group | None) -> Floats:
        return np.asarray((rewards - rewards.mean()) * (rewards.size / (rewards.size - 1)))


class RewardAdvantage(Advantage):
    """R itself (REINFORCE)."""

    kind: Literal["reward"] = "reward"


class GreedyBaselineAdvantage(Advantage):
    """R - the reward of one more response, which is sampled greedily and never trained on (ReMax)."""

    kind: Literal["greedy_baseline"] = "greedy_baseline"

    has_greedy: ClassVar[bool] = True

    def _of(self, rewards: Floats, group: Group | None) -> Floats:
        baseline = group.greedy.reward if group and group.greedy else None
        if baseline is None or not np.isfinite(baseline):
            raise ValueError(f"greedy_baseline needs the finite reward of a greedy response, got {baseline}")
        return np.asarray(rewards - baseline)


class GaeAdvantage(Advantage):
    """Generalized advantage estimates of a critic (PPO; see the section critic), from R."""

    kind: Literal["gae"] = "gae"
    discount: float = Field(default=1.0, gt=0, le=1)
    """gamma: how much less a reward counts a token later."""
    decay: float = Field(default=1.0, ge=0, le=1)
    """lambda: 1 takes the rewards that follow as they are, less trusts the critic's values more."""

    uses_critic: ClassVar[bool] = True


class OwnAdvantage(OwnCode, Advantage):  # type: ignore[misc]
    """An advantage of your own: `function(rewards, group, **settings)` returns one number per response [G]."""

    key: ClassVar[str] = "algorithm.advantage"
    compares_group: ClassVar[bool] = True

    def of_group(self, rewards: npt.ArrayLike, group: Group | None = None) -> Floats:
        """What the function returns. Raises InputError for one that cannot be used."""
        given = np.array(rewards, dtype=np.float64)
        returned = self.call(rewards=given.copy(), group=group)
        try:
            values = np.asarray(returned, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.empty(0)
        if values.shape != given.shape or not np.isfinite(values).all():
            raise self.unusable(f"it returned {returned!r:.200}, not {len(given)} finite numbers")
        return values

    def try_out(self, group_size: int) -> None:
        for group in made_up_groups(group_size):
            self.of_group([scored.reward for scored in group.trajectories], group)


AdvantageChoice = (
    GroupNormAdvantage
    | GroupMeanAdvantage
    | LeaveOneOutAdvantage
    | RewardAdvantage
    | GreedyBaselineAdvantage
    | GaeAdvantage
    | OwnAdvantage
)


def whitened(advantages: npt.ArrayLike, num_tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Advantages of all responses of a step, [S] float64, minus their mean and over their standard deviation
    (REINFORCE++, arXiv 2501.03262, eq. 10).

    A response counts with its `num_tokens` [S] in the loss, as if every token had the advantage; the deviation is the
    root of the population's variance + 1e-8. Equal advantages, and those of a step without tokens, become 0.
    """
    values, weights = np.asarray(advantages, dtype=np.float64), np.asarray(num_tokens, dtype=np.float64)
    counted = values[weights > 0]
    if counted.size == 0 or are_equal(counted):
        return np.zeros_like(values)
    centred = values - np.average(values, weights=weights)
    return np.asarray(centred / np.sqrt(np.average(centred**2, weights=weights) + VARIANCE_FLOOR))
