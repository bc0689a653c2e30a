"""The rows of a file: one response each, with all that is known about it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dapo_mega.types import Group, GroupFate, GroupOutcome, Prompt, ScoredTrajectory, Trajectory

Floats = npt.NDArray[np.float32]
Kind = Literal["training", "evaluation"]

OUTCOMES_KEPT = ("trained", "surplus")
FORMAT = 1
"""The version of the files' format."""


@dataclass(frozen=True, eq=False)
class Training:
    """What training knows about one trajectory beside its score. `sample` is its number within the step.

    Each column is [R], NaN where nothing was sampled: `trainer_logprobs` under the weights that the step starts from,
    `update_logprobs` in the last update that the trajectory took part in (None if that was the first), `advantages`
    (None if all of them are `advantage`).
    """

    sample: int
    advantage: float
    in_loss: bool
    trainer_logprobs: Floats
    update_logprobs: Floats | None = None
    advantages: Floats | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """One trajectory, not scored if its group was given up. `outcome` and `kept` are None in evaluations; `group` is
    the smallest id of the group's trajectories."""

    group: int
    prompt: Prompt
    trajectory: Trajectory
    outcome: GroupOutcome | None = None
    is_greedy: bool = False
    training: Training | None = None

    @property
    def scored(self) -> ScoredTrajectory | None:
        return self.trajectory if isinstance(self.trajectory, ScoredTrajectory) else None

    @property
    def is_kept(self) -> bool | None:
        return None if self.outcome is None else self.outcome in OUTCOMES_KEPT


@dataclass(frozen=True, eq=False)
class SampleFile:
    """The content of one file: its rows, and `account`, JSON values that describe the whole step."""

    step: int
    kind: Kind
    rows: Sequence[Row]
    account: Mapping[str, Any] = field(default_factory=dict)


def rows_of_group(group: Group, outcome: GroupOutcome | None = None) -> Iterator[Row]:
    """The trajectories of a group, the greedy one last, without what training knows."""
    first = min(member.id for member in group.trajectories)
    for member in group.members:
        yield Row(first, group.prompt, member, outcome, is_greedy=member is group.greedy)


def rows_of_evaluation(results: Sequence[tuple[Prompt, Trajectory]]) -> list[Row]:
    """The trajectories of an evaluation, which come in the order of requests."""
    first: dict[int, int] = {}
    for prompt, trajectory in results:
        first.setdefault(prompt.index, trajectory.id)
    return [Row(first[prompt.index], prompt, trajectory) for prompt, trajectory in results]


def rows_of(fate: GroupFate) -> Iterator[Row]:
    """The trajectories of a training group, also of one that was given up."""
    if fate.group:
        yield from rows_of_group(fate.group, fate.outcome)
    first = min((trajectory.id for trajectory in fate.unscored), default=0)
    for trajectory in fate.unscored:
        yield Row(first, fate.prompt, trajectory, fate.outcome)
