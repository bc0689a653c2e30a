"""Writes `status.json` in a run's folder: how the last command ended, because torchrun's exit status is only 0 or 1."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from dapo_mega.atomic_files import make_way, parse_json
from dapo_mega.cli import EXIT_CONTINUE, EXIT_FLEET, EXIT_INTERRUPTED
from dapo_mega.training.run_lock import is_locked

State = Literal["running", "finished", "stopped", "failed"]
STATUS_FILE = "status.json"


class RunStatus:
    """Writes `folder/status.json` if the folder exists. `completed_step()` is the last completed step.

    `has_lock`: this run holds the folder's lock. Without the lock, the status of a trainer that works there is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / STATUS_FILE
        self.completed_step: Callable[[], int] = lambda: 0
        self.has_lock = False

    def running(self) -> None:
        """Training is running. If no trainer is alive, it was killed, and the same command continues it."""
        self._write("running", None, "", can_continue=True)

    def finished(self) -> None:
        """All steps are done and the model is exported."""
        self._write("finished", 0, "", can_continue=False)

    def is_finished(self) -> bool:
        """Whether the file says `finished`."""
        return read_status(self._folder).get("state") == "finished"

    def left(self, message: str, status: int) -> None:
        """A process of the run ends early with this exit status. An action for `cli.before_leaving`."""
        if self._folder.is_dir() and (self.has_lock or not is_locked(self._folder)):
            state: State = "stopped" if status in (EXIT_CONTINUE, EXIT_INTERRUPTED) else "failed"
            self._write(state, status, message, can_continue=status in (EXIT_CONTINUE, EXIT_FLEET))

    def _write(self, state: State, exit_status: int | None, message: str, can_continue: bool) -> None:
        """The field `continue` tells whether the same command continues the run without changes."""
        content: dict[str, Any] = {
            "state": state,
            "exit_status": exit_status,
            "continue": can_continue,
            "step": self.completed_step(),
            "message": " ".join(message.split()),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        # Several processes may leave at the same moment.
        temporary = self._file.with_name(f".{STATUS_FILE}.{os.getpid()}")
        try:
            make_way(self._file)
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            temporary.replace(self._file)
        except OSError:
            temporary.unlink(missing_ok=True)  # A full disk must not hide why the run ends.


def read_status(folder: Path) -> dict[str, Any]:
    """What `status.json` in the folder says; empty where none can be read."""
    file = folder / STATUS_FILE
    try:
        content = parse_json(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
