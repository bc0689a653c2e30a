"""Advantages and filters of groups of the user's own, and the trial of all own code before a run begins."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dapo_mega.config import AlgorithmConfig, OwnCode, OwnLoss
from dapo_mega.own_code import call, forget, unusable
from dapo_mega.types import Group, Prompt, Response, ScoredTrajectory, Trajectory

_ADVANTAGE, _FILTER = "algorithm.advantage", "algorithm.dynamic_sampling_on"


def own_advantages(own: OwnCode, rewards: npt.NDArray[np.float64], group: Group) -> npt.NDArray[np.float64]:
    """One advantage per trajectory [G] from `function(rewards, group, **settings)`; `rewards` [G] have the KL penalty
    taken off. Raises InputError for a function that cannot be used."""
    returned = call(_ADVANTAGE, own.path, own.settings, rewards=rewards.copy(), group=group)
    try:
        values = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape != rewards.shape or not np.isfinite(values).all():
        raise unusable(_ADVANTAGE, own.path, f"it returned {returned!r:.200}, not {len(rewards)} finite numbers")
    return values


def is_kept(own: OwnCode, group: Group) -> bool:
    """Whether `function(group, **settings)` keeps the group. Raises InputError for a function that cannot be used."""
    returned = call(_FILTER, own.path, own.settings, group=group)
    if not isinstance(returned, bool | np.bool_):
        raise unusable(_FILTER, own.path, f"it returned {returned!r:.200}, not True or False")
    return bool(returned)


def try_own_code(algorithm: AlgorithmConfig, group_size: int) -> None:
    """Load the user's own code as it is now, and call it with made-up tokens and groups. Raises InputError for what
    cannot be used."""
    forget()
    for name, own in algorithm.own_code.items():
        if isinstance(own, OwnLoss):
            from dapo_mega.algorithms import policy_losses  # With torch, which not all that plan need.

            policy_losses.forget()
            policy_losses.policy_loss(own)
            continue
        for group in _made_up_groups(group_size):
            if name == "advantage":
                own_advantages(own, np.array([scored.reward for scored in group.trajectories]), group)
            else:
                is_kept(own, group)


def _made_up_groups(size: int) -> Iterator[Group]:
    """One with right and wrong responses, and one with wrong ones only."""
    prompt = Prompt(0, "1 + 1 =", np.arange(3, dtype=np.int32), "2", problem="1 + 1 =")
    for right in ((size + 1) // 2, 0):
        scored = []
        for i in range(size):
            is_right, length = i < right, 2 + i
            tokens, logprobs = np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32)
            trajectory = Trajectory.of(Response(i, tokens, logprobs, "stop", 0))
            reward = 1.0 if is_right else -1.0
            verdict = {"text": "2" if is_right else "3", "correct": is_right, "answer": "2" if is_right else "3"}
            scored.append(ScoredTrajectory.judged(trajectory, accuracy_reward=reward, reward=reward, **verdict))
        yield Group(prompt, tuple(scored))
