"""The clipped squared error of a value model (critic), and how much of the returns its values explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_mega.algorithms.ratios import mean_over

# A smaller variance, relative to the mean square, is rounding of equal float32 returns.
_NO_VARIANCE = 1e-12


@dataclass(frozen=True)
class ValueLosses:
    """For each token [T]: `loss` carries the gradient; `clipped` marks those whose gradient the bound removed."""

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLosses:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 per token; all inputs [T].

    As in PPO's public code (Schulman et al. 2017): a value gets no gradient that moves it further than `clip` from the
    one that the step started from. `clip` None: (V - R)^2 / 2.
    """
    if not (values.shape == old_values.shape == returns.shape and values.ndim == 1):
        raise ValueError(
            f"expected three tensors of one shape [T], got {tuple(values.shape)}, {tuple(old_values.shape)}, "
            f"{tuple(returns.shape)}"
        )
    error = (values - returns).square()
    if clip is None:
        return ValueLosses(0.5 * error, torch.zeros_like(values, dtype=torch.bool))
    clipped_error = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLosses(0.5 * torch.maximum(error, clipped_error), clipped_error > error)


def explained_variance(
    count: float, return_sum: float, return_squares: float, error_sum: float, error_squares: float
) -> float:
    """1 - Var(R - V) / Var(R) from sums over tokens: of R, R^2, R - V and (R - V)^2, in float64.

    1: the values are the returns; 0: they are no better than a constant, or all returns are equal; negative: worse.
    """
    variance = _variance(count, return_sum, return_squares)
    if variance <= _NO_VARIANCE * mean_over(return_squares, count):
        return 0.0
    return 1.0 - _variance(count, error_sum, error_squares) / variance


def _variance(count: float, total: float, squares: float) -> float:
    return mean_over(squares, count) - mean_over(total, count) ** 2
