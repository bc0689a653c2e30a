"""The extension in a rehearsal, whose tensors have no values: each of its functions is one kernel, which holds nothing
but what it returns."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from dapo_mega.rehearsal.device import PretendedDevice


def make_kernels(extension: types.ModuleType) -> None:
    """Let a rehearsal count what the extension's functions hold as that of kernels."""
    for name, function in list(vars(extension).items()):
        if isinstance(function, types.FunctionType) and not name.startswith("_"):
            setattr(extension, name, _kernel(function))


def _kernel(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = _get_current_dispatch_mode()
        if not isinstance(device, PretendedDevice):
            return function(*args, **kwargs)
        with device.kernel():
            return function(*args, **kwargs)

    return call


def count(num_operations: int) -> None:
    """Count operations of a kernel that is not computed."""
    device = _get_current_dispatch_mode()
    assert isinstance(device, PretendedDevice)
    device.flops += num_operations
