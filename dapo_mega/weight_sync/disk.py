"""Sends weights through a folder that trainer and engines share: one Hugging Face checkpoint per version."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.weight_sync.update import Sent, Transport, Update, UpdateCalls

if TYPE_CHECKING:
    from dapo_mega.weight_sync.sending import WeightCommands


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
        calls.call(lambda client: client.update_weights_from_disk(str(path), update.label, update.flush_cache))
        for older in self._folder.glob("version_*"):
            if older != path:
                shutil.rmtree(older, ignore_errors=True)  # An engine may still read it.
        return Sent(sum(file.stat().st_size for file in path.glob("*.safetensors")))
