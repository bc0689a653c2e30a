"""Makes both ends of what `weight_sync.transport` names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from dapo_mega.config import RunConfig
from dapo_mega.config.fleet import parse_address
from dapo_mega.distributed.processes import Processes
from dapo_mega.errors import InputError
from dapo_mega.weight_sync.broadcast import BroadcastSender, BroadcastTransport
from dapo_mega.weight_sync.disk import DiskTransport
from dapo_mega.weight_sync.sending import WeightCommands
from dapo_mega.weight_sync.shared_memory import SharedMemorySender, SharedMemoryTransport
from dapo_mega.weight_sync.update import SenderPlaces, Transport, WeightSender


def make_sender(config: RunConfig, processes: Processes) -> WeightSender | None:
    """What each process of the trainer needs to send. Collective. Raises InputError if the setting does not fit the
    engines or the machines."""
    fp8 = config.engine_dtype == "fp8"
    if config.sync_transport == "distributed":
        fleet = config.rollout.fleet  # A host on the engines' network.
        towards = parse_address(fleet.rendezvous)[0] if fleet.rendezvous else str(urlsplit(fleet.urls[0]).hostname)
        return BroadcastSender(processes, config.weight_sync, towards=towards, dtype=config.engine_dtype)
    if config.sync_transport == "tensor":
        return SharedMemorySender(processes, config.weight_sync, fp8=fp8)
    if fp8:
        raise InputError(
            "weight_sync.transport=disk writes unquantized checkpoints but rollout.dtype=fp8; set "
            "weight_sync.transport to distributed or tensor"
        )
    return None


def make_transport(config: RunConfig, trainer: WeightCommands, places: SenderPlaces | None) -> Transport:
    """The other end, with which a process commands a trainer that sends from these places."""
    if places:
        return BroadcastTransport(trainer, places, config.weight_sync)
    if config.sync_transport == "tensor":
        return SharedMemoryTransport(trainer)
    return DiskTransport(trainer, Path(config.weight_sync.folder or Path(config.output_dir) / "weight_sync"))
