"""Advantages and filters of groups of the user's own, and the trial of all own code before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo_mega.config import AlgorithmConfig, OwnCode, OwnLoss
from dapo_mega.errors import InputError
from dapo_mega.own_code import MisuseError, check_call, described, load_function
from dapo_mega.types import Group, Prompt, Response, ScoredTrajectory, Trajectory

_ARGUMENTS = {"advantage": ("rewards", "group"), "dynamic_sampling_on": ("group",)}


def own_advantages(own: OwnCode, rewards: npt.NDArray[np.float64], group: Group) -> npt.NDArray[np.float64]:
    """One advantage per trajectory [G] from `function(rewards, group, **settings)`; `rewards` [G] have the KL penalty
    taken off. Raises InputError for a function that cannot be used."""
    returned = _called("advantage", own, rewards.copy(), group)
    try:
        values = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape != rewards.shape or not np.isfinite(values).all():
        raise _unusable("advantage", own, f"it returned {returned!r:.200}, not {len(rewards)} finite numbers")
    return values


def is_kept(own: OwnCode, group: Group) -> bool:
    """Whether `function(group, **settings)` keeps the group. Raises InputError for a function that cannot be used."""
    returned = _called("dynamic_sampling_on", own, group)
    if not isinstance(returned, bool | np.bool_):
        raise _unusable("dynamic_sampling_on", own, f"it returned {returned!r:.200}, not True or False")
    return bool(returned)


def try_own_code(algorithm: AlgorithmConfig, group_size: int) -> None:
    """Load the user's own code and call it with made-up tokens and groups. Raises InputError for what cannot be
    used."""
    for name, own in algorithm.own_code.items():
        if isinstance(own, OwnLoss):
            from dapo_mega.algorithms.policy_losses import policy_loss  # With torch, which not all that plan need.

            policy_loss(own)
            continue
        for group in _made_up_groups(group_size):
            if name == "advantage":
                own_advantages(own, np.array([scored.reward for scored in group.trajectories]), group)
            else:
                is_kept(own, group)


@cache
def _loaded(key: str, path: str, settings: tuple[str, ...]) -> Callable[..., Any]:
    function = load_function(path)
    check_call(function, _ARGUMENTS[key], dict.fromkeys(settings))
    return function


def _called(key: str, own: OwnCode, *given: Any) -> Any:
    try:
        function = _loaded(key, own.path, tuple(own.settings))
    except MisuseError as error:
        raise _unusable(key, own, str(error)) from None
    try:
        return function(*given, **own.settings)
    except Exception as error:
        raise _unusable(key, own, f"it raises {described(error, own.path.rpartition(':')[0])}") from error


def _unusable(key: str, own: OwnCode, problem: str) -> InputError:
    return InputError(f"algorithm.{key}: {own.path}: {problem}")


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
