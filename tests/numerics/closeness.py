"""What two float32 programs may differ by, on the CPU and on a GPU."""

from __future__ import annotations

import torch


def on_this_device(tolerance: float) -> float:
    """The tolerance of two programs on a CPU, as that of a GPU and a CPU."""
    return 10 * tolerance if torch.cuda.is_available() else tolerance


def assert_alike(
    actual: torch.Tensor, expected: torch.Tensor, *, rtol: float = 1e-4, atol: float = 1e-5, name: str = ""
) -> None:
    """The values, wherever they lie, within `on_this_device`'s tolerances."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=on_this_device(rtol),
        atol=on_this_device(atol),
        check_device=False,
        msg=lambda text: f"{name}: {text}",
    )
