"""Statistics over the problems of an evaluation: pass@k, intervals by the bootstrap, and a paired test.

What is uncertain is which problems a benchmark holds, and what was sampled for each: both are in the spread of the
problems' values, so intervals and tests take problems, never single responses, as independent (Miller, "Adding error
bars to evals", arXiv 2411.00640).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_RESAMPLES: Final = 10_000
_SEED: Final = 0
_TAIL: Final = 0.025
_MAX_ENUMERATED: Final = 13
"""2^13 sign patterns are fewer than `NUM_RESAMPLES`."""
_VALUES_AT_ONCE: Final = 2_000_000
_NORMAL: Final = NormalDist()


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def pass_at_each_k(num_samples: npt.ArrayLike, num_correct: npt.ArrayLike, max_k: int) -> Floats:
    """Unbiased estimates [max_k, P] of P(at least one of k samples is correct) for k = 1 to `max_k`, of P problems.

    1 - C(n-c, k) / C(n, k) of Chen et al. (arXiv 2107.03374, eq. 1), as a product of shares that never overflows.
    Raises ValueError unless 1 <= max_k <= n and 0 <= c <= n for every problem.
    """
    n, c = np.atleast_1d(np.asarray(num_samples, np.int64)), np.atleast_1d(np.asarray(num_correct, np.int64))
    if not 0 < max_k <= n.min():
        raise ValueError(f"k={max_k} must be between 1 and the number of samples {n.min()}")
    if (c < 0).any() or (c > n).any():
        raise ValueError("the number of correct samples must be between 0 and the number of samples")
    drawn = np.arange(max_k)[:, None]
    # The chance that the next draw is wrong too, after so many wrong ones.
    shares = np.maximum(n - c - drawn, 0) / (n - drawn)
    return np.asarray(1.0 - np.cumprod(shares, axis=0))


def estimate_means(values: npt.ArrayLike) -> list[Estimate]:
    """The mean of each row of `values` [M, P] over the P problems, with bias-corrected and accelerated (BCa) bootstrap
    intervals of 95 % (Efron, JASA 82, 1987).

    10,000 resamples of the problems with a fixed seed, the same ones for all rows. Where all problems have one value,
    the interval is that value: the problems show no spread. Raises ValueError without problems.
    """
    data = np.atleast_2d(np.asarray(values, np.float64))
    if not data.size:
        raise ValueError("there are no problems to average over")
    resampled = np.concatenate([data @ weights for weights in _resamples(data.shape[1])], axis=1)
    return [_bca(row, means) for row, means in zip(data, resampled, strict=True)]


def _resamples(num_problems: int) -> Iterator[Floats]:
    """Blocks [P, R] of how much each problem counts in each resample."""
    rng = np.random.Generator(np.random.PCG64(_SEED))
    block = max(1, min(NUM_RESAMPLES, _VALUES_AT_ONCE // num_problems))
    for start in range(0, NUM_RESAMPLES, block):
        size = min(block, NUM_RESAMPLES - start)
        chosen = rng.integers(num_problems, size=(size, num_problems))
        places = (chosen + np.arange(size)[:, None] * num_problems).ravel()
        counts = np.bincount(places, minlength=size * num_problems).reshape(size, num_problems)
        yield counts.T / num_problems


def _bca(data: Floats, resampled: Floats) -> Estimate:
    """Efron's interval of the mean of `data` [P], given the means [R] of resamples."""
    mean = float(data.mean())
    deviations = data - mean
    spread = float((deviations**2).sum())
    if np.ptp(data) == 0.0:
        return Estimate(mean, mean, mean)
    # Equal means count half: those of few problems are coarse. The tolerance is that of summing in another order.
    near = 1e-12 * max(1.0, abs(mean))
    below = np.mean(resampled < mean - near)
    share = float(below + (np.mean(resampled <= mean + near) - below) / 2)
    bias = _NORMAL.inv_cdf(min(max(share, 1 / NUM_RESAMPLES), 1 - 1 / NUM_RESAMPLES))
    acceleration = float((deviations**3).sum()) / (6 * spread**1.5)
    bounds = []
    for tail in (_TAIL, 1 - _TAIL):
        z = bias + _NORMAL.inv_cdf(tail)
        bounds.append(_NORMAL.cdf(bias + z / (1 - acceleration * z)))
    low, high = np.quantile(resampled, bounds)
    return Estimate(mean, float(low), float(high))


def paired_p_value(differences: npt.ArrayLike) -> float:
    """Two-sided p-value of a mean of paired differences [P] over problems: the sign-flip (Fisher's) permutation test.

    If both models were the same, each problem's difference would have either sign with equal chance. The value is the
    share of sign patterns whose mean is at least as far from 0 as the one observed: over all patterns up to 13
    problems that differ, beyond over 10,000 random ones of a fixed seed, the observed one counted among them (Phipson
    and Smyth 2010, so that it is never 0).
    """
    data = np.asarray(differences, np.float64)
    moved = data[data != 0]
    if not len(moved):
        return 1.0
    # Patterns whose sums are equal but for rounding are equally far, also where the sum is 0.
    observed = abs(float(moved.sum())) - 1e-12 * float(np.abs(moved).sum())
    if len(moved) <= _MAX_ENUMERATED:
        patterns = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ moved) >= observed))
    rng = np.random.Generator(np.random.PCG64(_SEED))
    as_far, block = 0, max(1, _VALUES_AT_ONCE // len(moved))
    for start in range(0, NUM_RESAMPLES, block):
        signs = 2 * rng.integers(2, size=(min(block, NUM_RESAMPLES - start), len(moved)), dtype=np.int8) - 1
        as_far += int(np.sum(np.abs(signs @ moved) >= observed))
    return (as_far + 1) / (NUM_RESAMPLES + 1)
