"""Opens torch.distributed stores that listen on one address only, and finds this address."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

_AGREEMENT_S = 1800.0
_POLL_S = 0.05


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
    with it the addresses of those that have ended. Collective the first time, where several machines share a store that
    a torchrun keeps."""
    environment = os.environ
    number = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_shared and int(environment.get("GROUP_WORLD_SIZE", "1")) > 1:
        place = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        number = agreed_attempt(*place, int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    return f"dapo_mega/attempt_{number}"


@functools.cache
def agreed_attempt(address: str, port: int, rank: int, world_size: int) -> str:
    """A name of this attempt that all its processes agree on. Collective over them; each machine's torchrun counts
    only the attempts that ended on its own machine, so their numbers differ.

    Rank 0 names the attempt and confirms each process that asks for it: a name that is not confirmed is that of
    processes which have ended.
    """
    store = dist.PrefixStore("dapo_mega/agreement", connect_store(address, port, _AGREEMENT_S))
    own = secrets.token_hex(8)
    if rank == 0:
        store.set("name", own)
        for other in range(1, world_size):
            store.set(store.get(f"{own}/{other}").decode(), own)
        return own
    deadline = time.monotonic() + _AGREEMENT_S
    while time.monotonic() < deadline:
        store.set(f"{store.get('name').decode()}/{rank}", own)
        if store.check([own]):
            return store.get(own).decode()
        time.sleep(_POLL_S)
    raise dist.DistStoreError(f"the first process at {address}:{port} did not confirm this one in {_AGREEMENT_S:g} s")
