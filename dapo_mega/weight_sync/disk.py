"""Sends weights through a folder that trainer and engines share: one Hugging Face checkpoint per version."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from dapo_mega.distributed.processes import Processes
from dapo_mega.engines.sglang.engine_client import EngineClient
from dapo_mega.types import WeightSource
from dapo_mega.weight_sync.update import Sent, Transport, Update, UpdateCalls


class DiskTransport(Transport):
    """Keeps only the last update's checkpoint in the folder, also after the run: engines may still read it."""

    uses_sessions = False

    def __init__(self, processes: Processes, folder: Path, export: Callable[[Path], None]) -> None:
        """`export` writes the policy as a Hugging Face checkpoint atomically; a collective."""
        self._processes = processes
        self._folder = folder.absolute()
        self._export = export

    def send(self, policy: WeightSource, update: Update, session: UpdateCalls | None) -> Sent:
        """See `Transport`. Raises InputError when writing fails."""
        path = self._folder / f"version_{update.version:08d}"
        self._export(path)
        box = [0]
        if session:

            async def load(client: EngineClient) -> None:
                await client.update_weights_from_disk(str(path), update.label, update.flush_cache)

            session.call(load)
            box[0] = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            for older in self._folder.glob("version_*"):
                if older != path:
                    shutil.rmtree(older, ignore_errors=True)  # An engine may still read it.
        dist.broadcast_object_list(box, src=0, group=self._processes.control)
        return Sent(box[0])
