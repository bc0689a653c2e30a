"""Process groups of one of the trainer's processes and all processes of one engine.

They live beside Megatron's groups and are unknown to `torch.distributed`. Each engine has its own: gloo does not notice
that a member died while it waits in a broadcast, and NCCL cannot be interrupted from outside, so in a group of several
engines one that dies or hangs would take those with it that receive through it or wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist


class Broadcasting(Protocol):
    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work: ...


class EngineGroup(Broadcasting, Protocol):
    """What is used of torch's groups; its stubs leave it out."""

    def abort(self) -> None: ...


class Lanes:
    """Several groups of the same processes, between which broadcasts are shared out: each goes through the one that has
    had the fewest bytes. All processes must broadcast the same sizes in the same order.

    A connection stands still for a moment between two of gloo's broadcasts, in which another one can be busy.
    """

    def __init__(self, groups: Sequence[EngineGroup]) -> None:
        self._groups = groups
        self._num_bytes = [0] * len(groups)

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        lane = self._num_bytes.index(min(self._num_bytes))
        self._num_bytes[lane] += tensor.nbytes
        return self._groups[lane].broadcast(tensor, root)


def most_lanes(device: torch.device) -> int:
    """How many groups each stage has with an engine that has the plugin. NCCL fills the network with one, and two that
    are used in different orders at both ends would wait for each other for ever."""
    return 1 if device.type == "cuda" else 2


def lane_names(name: str, num_lanes: int) -> list[str]:
    """Of groups that are used together; a single one has the `name` itself."""
    return [name, *(f"{name}-lane-{lane}" for lane in range(1, num_lanes))]


def backend_name(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def join_group(
    store: dist.Store, name: str, size: int, device: torch.device, address: str, timeout_s: float, rank: int = 0
) -> EngineGroup:
    """Join the group `name`; gloo waits for the others.

    Raises RuntimeError when they do not come in time. SGLang joins with torch.distributed, whose prefixes of the keys
    in the store these are (2.11 to 2.13).
    """
    keys = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # Later than whoever waits for a broadcast gives up and aborts: torch ends the process at this timeout.
        nccl._timeout = timedelta(seconds=4 * timeout_s)
        return cast(EngineGroup, dist.ProcessGroupNCCL(keys, rank, size, nccl))
    make: Any = dist.ProcessGroupGloo
    gloo = make._Options()
    gloo._devices = [make.create_device(hostname=address)]
    gloo._timeout = timedelta(seconds=timeout_s)
    return cast(EngineGroup, make(keys, rank, size, gloo))
