"""Makes the transport that `weight_sync.transport` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from dapo_mega.config import FleetConfig, RunConfig
from dapo_mega.config.fleet import parse_address
from dapo_mega.distributed.processes import Processes
from dapo_mega.errors import InputError
from dapo_mega.weight_sync.broadcast import BroadcastTransport
from dapo_mega.weight_sync.disk import DiskTransport
from dapo_mega.weight_sync.shared_memory import SharedMemoryTransport
from dapo_mega.weight_sync.update import Transport


def make_transport(config: RunConfig, processes: Processes, export: Callable[[Path], None]) -> Transport:
    """Collective. `export` writes the policy as a Hugging Face checkpoint. Raises InputError if the setting does not
    fit the engines or the machines."""
    sync = config.weight_sync
    kind = config.sync_transport
    fp8 = config.engine_dtype == "fp8"
    if kind == "distributed":
        towards = _engines_host(config.rollout.fleet)
        return BroadcastTransport(processes, sync, towards=towards, dtype=config.engine_dtype)
    if kind == "tensor":
        return SharedMemoryTransport(processes, sync, fp8=fp8)
    if fp8:
        raise InputError(
            "weight_sync.transport=disk writes unquantized checkpoints but rollout.dtype=fp8; set "
            "weight_sync.transport to distributed or tensor"
        )
    return DiskTransport(processes, Path(sync.folder or Path(config.output_dir) / "weight_sync"), export)


def _engines_host(fleet: FleetConfig) -> str:
    """A host on the engines' network."""
    if fleet.rendezvous:
        return parse_address(fleet.rendezvous)[0]
    return str(urlsplit(fleet.urls[0]).hostname)
