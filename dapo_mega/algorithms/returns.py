"""Returns and advantages token by token, for rewards and values that differ within a response."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def discounted_sums(terms: npt.ArrayLike, segment_ids: npt.ArrayLike, discount: float) -> Floats:
    """sum_{l >= 0} discount^l term_{t+l} within every segment, [N] float64; `terms` [N] are ordered by segment and then
    by time, and `segment_ids` [N] say where a segment ends."""
    values = np.asarray(terms, dtype=np.float64).tolist()
    ids = np.asarray(segment_ids).tolist()
    running, following = 0.0, None
    for t in range(len(values) - 1, -1, -1):
        running = values[t] + (discount * running if ids[t] == following else 0.0)
        following = ids[t]
        values[t] = running
    return np.array(values)


def generalized_advantages(
    rewards: npt.ArrayLike, values: npt.ArrayLike, segment_ids: npt.ArrayLike, *, discount: float, decay: float
) -> Floats:
    """GAE: A_t = sum_l (gamma lambda)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438).

    `rewards` and `values` [N] are those of the response tokens, ordered as for `discounted_sums`; the value after the
    last token of a response is 0. `discount` is gamma and `decay` lambda.
    """
    own = np.asarray(values, dtype=np.float64)
    ids = np.asarray(segment_ids)
    following = np.append(own[1:], 0.0) * np.append(ids[1:] == ids[:-1], False)
    deltas = np.asarray(rewards, dtype=np.float64) + discount * following - own
    return discounted_sums(deltas, ids, discount * decay)


def is_last_of_segment(segment_ids: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which tokens [N] are the last of their segment."""
    ids = np.asarray(segment_ids)
    return np.append(ids[1:] != ids[:-1], True)[: len(ids)]
