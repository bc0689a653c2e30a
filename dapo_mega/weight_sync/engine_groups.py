"""Process groups of one trainer rank with all ranks of one engine.

These groups exist beside Megatron's and are unknown to `torch.distributed`. Each engine has its own group, because a
dead or hung engine blocks all members of its group: gloo does not notice that a member died during a broadcast, and
NCCL cannot be interrupted from outside.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from dapo_mega.engines.sglang.weight_protocol import PATIENCE


class EngineGroup(Protocol):
    """The part of torch's groups that is used here; torch's type stubs lack it."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work: ...

    def abort(self) -> None: ...


def join_group(
    store: dist.Store, name: str, size: int, device: torch.device, address: str, timeout_s: float, rank: int = 0
) -> EngineGroup:
    """Join the group `name`. gloo waits for the other members and raises RuntimeError if they do not come in time.

    The store's keys have the prefixes of torch.distributed (2.11 to 2.14), which SGLang uses to join.
    """
    keys = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # torch ends the process at this timeout, so a waiting rank must abort the group earlier.
        nccl._timeout = timedelta(seconds=PATIENCE * timeout_s)
        return cast(EngineGroup, dist.ProcessGroupNCCL(keys, rank, size, nccl))
    make: Any = dist.ProcessGroupGloo
    gloo = make._Options()
    gloo._devices = [make.create_device(hostname=address)]
    gloo._timeout = timedelta(seconds=timeout_s)
    gloo._threads = 1  # Two broadcasts at the same time would share the rate, and the first one be there later.
    group = make(keys, rank, size, gloo)
    group._set_default_timeout(timedelta(seconds=PATIENCE * timeout_s))
    return cast(EngineGroup, group)
