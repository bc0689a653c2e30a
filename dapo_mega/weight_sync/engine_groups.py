"""Process groups of one of the trainer's processes and all processes of one engine.

They live beside Megatron's groups and are unknown to `torch.distributed`. Each engine has its own: gloo does not notice
that a member died while it waits in a broadcast, and NCCL cannot be interrupted from outside, so in a group of several
engines one that dies or hangs would take those with it that receive through it or wait for it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist


class EngineGroup(Protocol):
    """What is used of torch's groups; its stubs leave it out."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work: ...

    def abort(self) -> None: ...


def local_address(towards: str) -> str:
    """This machine's address on the way to the host `towards`, where that one reaches it."""
    family, _, _, _, address = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # Sends nothing.
        return str(probe.getsockname()[0])


def is_local(host: str) -> bool:
    """Whether the host is this machine, by any of its addresses."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A store that listens on a free port of this address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=os.dup(listening.fileno()),
        )


def connect_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client of a store of `open_store`."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


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
