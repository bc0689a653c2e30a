"""What two float32 programs may differ by, on the CPU and on a device."""

from __future__ import annotations

from typing import Any

import torch



def on_this_device(tolerance: float) -> float:
    """A tolerance of two CPU programs, as that of a GPU, which multiplies float32 in TF32: 13 bits less mantissa."""
    return 100 * tolerance if torch.cuda.is_available() else tolerance


def assert_alike(
    actual: torch.Tensor, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-5, name: str = ""
) -> None:
    """The values, wherever they lie, within the tolerances of CPU programs."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=on_this_device(rtol),
        atol=on_this_device(atol),
        check_device=False,
        msg=lambda text: f"{name}: {text}",
    )
