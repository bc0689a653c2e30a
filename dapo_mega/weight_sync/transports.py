"""Makes both ends of what `weight_sync.transport` names; and the one that needs no sender: a folder that trainer and
engines share, with one Hugging Face checkpoint per version."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from dapo_mega.config import RunConfig
from dapo_mega.config.fleet import parse_address
from dapo_mega.distributed.processes import Processes
from dapo_mega.errors import InputError
from dapo_mega.weight_sync.broadcast import BroadcastSender, BroadcastTransport, WeightCommands
from dapo_mega.weight_sync.shared_memory import SharedMemorySender, SharedMemoryTransport
from dapo_mega.weight_sync.update import SenderPlaces, Sent, Transport, Update, UpdateCalls


class DiskTransport(Transport):
    """Keeps only the last update's checkpoint in the folder, also after the run: engines may still read it."""

    uses_sessions = False

    def __init__(self, trainer: WeightCommands, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder.absolute()

    def bring(self, update: Update, calls: UpdateCalls, forgotten: Sequence[str]) -> Sent:
        """Raises InputError when writing fails."""
        path = self._folder / f"version_{update.version:08d}"
        self._trainer.export(path)
        calls.call(
            lambda client: client.command(
                "update_weights_from_disk",
                model_path=str(path),
                weight_version=update.label,
                flush_cache=update.flush_cache,
            )
        )
        for older in self._folder.glob("version_*"):
            if older != path:
                shutil.rmtree(older, ignore_errors=True)  # An engine may still read it.
        return Sent(sum(file.stat().st_size for file in path.glob("*.safetensors")))


def make_sender(config: RunConfig, processes: Processes) -> BroadcastSender | SharedMemorySender | None:
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
