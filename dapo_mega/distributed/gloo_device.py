"""One gloo device for all groups of a process.

torch makes a device for each group: a port and a thread that wakes up a hundred times a second. Megatron makes dozens
of groups, and on CPUs their waking takes up to a third of the processors' time.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

_devices: dict[int, list[Any]] = {}  # By process, as a fork has none of the threads.


def share_gloo_devices() -> None:
    """Let the groups that this process makes from now on share the devices of the interfaces in `GLOO_SOCKET_IFNAME`,
    or the default one. Does nothing with a torch whose groups cannot be given devices.
    """
    original: Any = getattr(c10d, "ProcessGroupGloo", None)
    is_shared = getattr(original, "shares_devices", False)
    if is_shared or not hasattr(getattr(original, "_Options", None), "_devices"):
        return

    def own_devices() -> list[Any]:
        if os.getpid() not in _devices:
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            devices = [original.create_device(interface=name) for name in interfaces]
            _devices[os.getpid()] = devices or [original.create_default_device()]
        return _devices[os.getpid()]

    class SharingGroup(original):  # type: ignore[misc, valid-type]
        shares_devices = True

        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta = c10d.default_pg_timeout, **settings: Any
        ) -> None:
            options = original._Options()
            options._devices = own_devices()
            options._threads = 2 * len(options._devices)  # As torch has it.
            options._timeout = timeout
            for name, value in settings.items():  # Of torch 2.14 and newer.
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    setattr(c10d, "ProcessGroupGloo", SharingGroup)  # noqa: B010 (mypy takes the name for a type)
