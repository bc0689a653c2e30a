"""torchrun's static rendezvous with a store that listens on one address only: `torchrun --rdzv-backend bound`.

    torchrun --nnodes M --rdzv-backend bound --rdzv-endpoint ADDRESS:PORT --rdzv-conf rank=N ...
    torchrun --rdzv-backend bound --rdzv-endpoint 127.0.0.1:0 ...       one machine, a free port

torchrun's own backends listen on all interfaces of a machine. torchrun finds this one by the entry point
`torchrun.handlers`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from dapo_mega.distributed.stores import open_store

_PORT = 29500
_TIMEOUT_S = 600


class BoundRendezvous(StaticTCPRendezvous):
    """The machine of rank 0 keeps the store, at the endpoint's address."""

    def get_backend(self) -> str:
        """The name by which torchrun asked for it."""
        return "bound"

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises OSError where rank 0 cannot listen on the endpoint."""
        if self.rank == 0 and self._store is None:
            store = open_store(self.master_addr, self.timeout.total_seconds(), self.master_port)
            self._store, self.master_port = store, store.port
        return super().next_rendezvous()


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What makes torchrun's handler from its arguments."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    is_alone = parameters.max_nodes == 1
    rank = parameters.get("rank", "0" if is_alone else None)
    if rank is None or not rank.isdecimal():
        raise ValueError("--rdzv-backend bound needs the machine's number, counted from 0: --rdzv-conf rank=N")
    address, port = parse_rendezvous_endpoint(parameters.endpoint, _PORT)
    if port == 0 and not is_alone:
        raise ValueError(
            "--rdzv-backend bound with several machines needs a port that all know: --rdzv-endpoint A:PORT"
        )
    timeout_s = int(parameters.get("timeout", _TIMEOUT_S))
    return BoundRendezvous(address, port, int(rank), parameters.max_nodes, parameters.run_id, timeout_s)
