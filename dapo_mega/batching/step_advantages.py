"""The advantage of every response of a step, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dapo_mega.algorithms.advantages import whitened
from dapo_mega.config import RunConfig
from dapo_mega.types import Group, ScoredTrajectory

Floats = npt.NDArray[np.float64]


def step_advantages(groups: Sequence[Group], config: RunConfig, penalties: npt.ArrayLike = 0.0) -> Floats:
    """One advantage per trajectory, groups in order, [S] float64.

    `penalties` [S] are taken off the trajectories' rewards first. Advantages are normalised over the step's tokens in
    the loss if `algorithm.normalize_advantages` is set.
    """
    advantages = raw_advantages(groups, config, penalties)
    if not config.algorithm.normalize_advantages:
        return advantages
    tokens = [scored.length * is_in_loss(scored, config) for group in groups for scored in group.trajectories]
    return whitened(advantages, tokens)


def raw_advantages(groups: Sequence[Group], config: RunConfig, penalties: npt.ArrayLike = 0.0) -> Floats:
    """`step_advantages` before normalisation."""
    taken_off = np.broadcast_to(np.asarray(penalties, dtype=np.float64), sum(len(g.trajectories) for g in groups))

    def of_groups() -> Iterator[Floats]:
        start = 0
        for group in groups:
            end = start + len(group.trajectories)
            rewards = np.array([scored.reward for scored in group.trajectories]) - taken_off[start:end]
            yield config.algorithm.advantage.of_group(rewards, group)
            start = end

    return np.concatenate(list(of_groups()))


def is_in_loss(scored: ScoredTrajectory, config: RunConfig) -> bool:
    """Whether a response counts in the loss: overlong filtering leaves truncated ones out."""
    return not (scored.is_truncated and config.reward.overlong_filtering)
