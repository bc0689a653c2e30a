"""Advantages from the rewards of one group of responses to the same prompt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dapo_mega.config import GROUP_BASELINES, AdvantageKind

VARIANCE_FLOOR = 1e-8
"""Added to a variance before its root divides, as in the public code of PPO's relatives: rounding must not become a
signal of full strength."""
_TOLERANCE = 4 * float(np.finfo(np.float32).eps)


def are_equal(scores: npt.ArrayLike) -> bool:
    """Whether scores, of which there is at least one, differ by no more than rounding in float32: by 5e-7, relative to
    the largest one if that is above 1."""
    values = np.asarray(scores, dtype=np.float64)
    return bool(np.ptp(values) <= _TOLERANCE * max(1.0, float(np.abs(values).max())))


def group_advantages(
    rewards: npt.ArrayLike, kind: AdvantageKind, greedy_reward: float | None = None
) -> npt.NDArray[np.float64]:
    """One advantage per response, [G] float64; all tokens of a response share it.

    - `group_norm`: (R_i - mean) / (std + 1e-6) with the unbiased std (DAPO eq. 9, as in its public code).
    - `group_mean`: R_i - mean (Dr. GRPO).
    - `leave_one_out`: R_i - mean of the other G - 1 rewards (RLOO).
    - `greedy_baseline`: R_i - `greedy_reward`, that of a greedy response to the prompt (ReMax).
    - `reward`: R_i (REINFORCE), also for `gae`, which makes advantages of it with a critic's values.

    Rewards that are equal up to rounding give exact zeros where the group is the baseline. Raises ValueError for
    non-finite rewards, and for fewer than two where responses are compared.
    """
    values = np.asarray(rewards, dtype=np.float64)
    fewest = 2 if kind in GROUP_BASELINES else 1
    if values.ndim != 1 or values.size < fewest:
        raise ValueError(f"rewards must be one-dimensional with at least {fewest} entries, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, got {values.tolist()}")
    if kind in ("reward", "gae"):
        return values.copy()
    if kind == "greedy_baseline":
        if greedy_reward is None or not np.isfinite(greedy_reward):
            raise ValueError(f"greedy_baseline needs the finite reward of a greedy response, got {greedy_reward}")
        return values - greedy_reward
    if are_equal(values):
        return np.zeros_like(values)
    centred = values - values.mean()
    if kind == "group_norm":
        return np.asarray(centred / (values.std(ddof=1) + 1e-6))
    if kind == "group_mean":
        return centred
    return centred * (values.size / (values.size - 1))


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
