"""Stand-in for Triton: kernels can be defined, not launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stand_in import stand_in_for

__version__ = "3.0.0"
__getattr__ = stand_in_for(__name__)


class Config:
    """One choice of `autotune`; takes anything."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass


def jit(function: Callable[..., Any] | None = None, **options: object) -> Callable[..., Any]:
    """Both `@jit` and `@jit(...)`; leaves the function as it is."""
    return function if function is not None else _unchanged


def autotune(*arguments: object, **options: object) -> Callable[..., Any]:
    """Leaves the function as it is."""
    return _unchanged


heuristics = autotune


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
