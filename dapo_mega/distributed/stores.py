"""Opens torch.distributed stores that listen on one address only, and finds this address."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist


def local_address(towards: str) -> str:
    """This machine's address on the route to the host `towards`."""
    family, _, _, _, address = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # Connecting a UDP socket sends nothing.
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


def open_store(address: str, timeout_s: float, port: int = 0) -> dist.TCPStore:
    """A store that listens on a port of this address only, by default a free one. Raises OSError if it cannot."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=1024) as listening:
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


def attempt_prefix() -> str:
    """What the keys in torchrun's store begin with: torchrun keeps the store when it starts its processes again, and
    with it the addresses of those that have ended."""
    return f"dapo_mega/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
