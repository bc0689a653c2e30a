"""Process groups of one trainer process with all processes of one engine.

They exist beside Megatron's groups and are unknown to `torch.distributed`. Each engine has its own: gloo does not
notice that a member died while it waits in a broadcast, and NCCL cannot be interrupted from outside, so in a group of
several engines one that dies or hangs would take the others with it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist


class Broadcasting(Protocol):
    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work: ...


class EngineGroup(Broadcasting, Protocol):
    """The part of torch's groups that is used here; torch's type stubs lack it."""

    def abort(self) -> None: ...


def backend_name(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def join_group(
    store: dist.Store, name: str, size: int, device: torch.device, address: str, timeout_s: float, rank: int = 0
) -> EngineGroup:
    """Join the group `name`. gloo waits for the other members and raises RuntimeError if they do not come in time.

    The keys in the store have the prefixes of torch.distributed (2.11 to 2.13), with which SGLang joins.
    """
    keys = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # torch ends the process at this timeout: whoever waits for a broadcast must give up and abort before.
        nccl._timeout = timedelta(seconds=4 * timeout_s)
        return cast(EngineGroup, dist.ProcessGroupNCCL(keys, rank, size, nccl))
    make: Any = dist.ProcessGroupGloo
    gloo = make._Options()
    gloo._devices = [make.create_device(hostname=address)]
    gloo._timeout = timedelta(seconds=timeout_s)
    return cast(EngineGroup, make(keys, rank, size, gloo))
