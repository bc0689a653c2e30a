"""Which groups are kept to train on (dynamic sampling, DAPO section 3.2), each rule a section of the configuration."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from dapo_mega.algorithms.advantages import are_equal
from dapo_mega.algorithms.made_up import made_up_groups
from dapo_mega.algorithms.own import OwnCode
from dapo_mega.declared import Section
from dapo_mega.errors import InputError
from dapo_mega.types import Group, ScoredTrajectory

OTHER_FILTERS = (
    "set algorithm.dynamic_sampling_on=unequal_scores (or {kind: score_threshold, threshold: NUMBER}), or "
    "algorithm.dynamic_sampling=false"
)
"""What to do where a reward does not say what is correct."""


class GroupFilter(Section):
    """One rule for the groups that are kept. Scores are rewards without length rewards: a group of wrong answers with
    different length penalties teaches nothing."""

    kind: str

    needs_correctness: ClassVar[bool] = False
    """Whether the reward must say which responses are correct."""
    instead: ClassVar[str] = ""
    """What a starved run may try in its place."""

    def passes(self, scored: ScoredTrajectory) -> bool | None:
        """Whether a response is right by itself; None where nothing says so."""
        return scored.correct

    def keeps(self, group: Group) -> bool:
        """Whether the group is trained on. Raises InputError where that cannot be said."""
        passed = [self.passes(scored) for scored in group.trajectories]
        if None in passed:
            raise InputError(
                f"algorithm.dynamic_sampling_on={self.kind}, but the reward did not say of every response whether it "
                f"is correct; {OTHER_FILTERS}"
            )
        return any(passed) and not all(passed)

    def dropped(self, num_dropped: int, num_right: int, num_wrong: int) -> str:
        """The groups that were not kept, in a message: of them `num_right` have right responses only, `num_wrong` wrong
        ones only."""
        return f"{num_right} all right, {num_wrong} all wrong"


class CorrectnessFilter(GroupFilter):
    """Some responses are right and some wrong (DAPO)."""

    kind: Literal["correctness"] = "correctness"

    needs_correctness: ClassVar[bool] = True
    instead: ClassVar[str] = "algorithm.dynamic_sampling_on=unequal_scores if your rewards are graded, or "


class ScoreThresholdFilter(GroupFilter):
    """Some responses score at least `threshold` and some less, for rewards that judge nothing right or wrong."""

    kind: Literal["score_threshold"] = "score_threshold"
    threshold: float
    """A response that scores at least this counts as right."""

    def passes(self, scored: ScoredTrajectory) -> bool:
        return scored.accuracy_reward >= self.threshold or are_equal([scored.accuracy_reward, self.threshold])


class UnequalScoresFilter(GroupFilter):
    """Not all responses score the same, for rewards that judge nothing right or wrong."""

    kind: Literal["unequal_scores"] = "unequal_scores"

    def keeps(self, group: Group) -> bool:
        return not are_equal([scored.accuracy_reward for scored in group.trajectories])

    def dropped(self, num_dropped: int, num_right: int, num_wrong: int) -> str:
        return f"{num_dropped} with equal scores"


class OwnFilter(OwnCode, GroupFilter):  # type: ignore[misc]
    """A rule of your own: `function(group, **settings)` returns whether the group is kept."""

    key: ClassVar[str] = "algorithm.dynamic_sampling_on"

    def keeps(self, group: Group) -> bool:
        returned = self.call(group=group)
        if not isinstance(returned, bool | np.bool_):
            raise self.unusable(f"it returned {returned!r:.200}, not True or False")
        return bool(returned)

    def dropped(self, num_dropped: int, num_right: int, num_wrong: int) -> str:
        return f"{num_dropped} that {self.path} did not keep"

    def try_out(self, group_size: int) -> None:
        for group in made_up_groups(group_size):
            self.keeps(group)


FilterChoice = CorrectnessFilter | ScoreThresholdFilter | UnequalScoresFilter | OwnFilter
