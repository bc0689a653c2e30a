"""Advantages from the rewards of one group of responses to the same prompt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dapo_mega.config import AdvantageKind


def group_advantages(rewards: npt.ArrayLike, kind: AdvantageKind) -> npt.NDArray[np.float64]:
    """One advantage per response, [G] float64; all tokens of a response share it.

    - `group_norm`: (R_i - mean) / (std + 1e-6) with the unbiased std (DAPO eq. 9, as in its public code).
    - `group_mean`: R_i - mean (Dr. GRPO).
    - `leave_one_out`: R_i - mean of the other G - 1 rewards (RLOO).

    Equal rewards give exact zeros. Raises ValueError for fewer than two or non-finite rewards.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size < 2:
        raise ValueError(f"rewards must be one-dimensional with at least 2 entries, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, got {values.tolist()}")
    # The mean of equal rewards may differ from them in the last bit, and the division by 1e-6 would turn that
    # into an advantage.
    if (values == values[0]).all():
        return np.zeros_like(values)
    centred = values - values.mean()
    if kind == "group_norm":
        return np.asarray(centred / (values.std(ddof=1) + 1e-6))
    if kind == "group_mean":
        return centred
    return centred * (values.size / (values.size - 1))
