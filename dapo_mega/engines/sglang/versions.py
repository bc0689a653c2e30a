"""How engines are told which weights they hold: by the run and the step that these are of."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

_MOST_CHARACTERS = 40
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class WeightVersion:
    """Weights of a run after a step, as text `run:step`; only `step` where the run has no name."""

    run: str
    step: int

    def __str__(self) -> str:
        return f"{self.run}:{self.step}" if self.run else str(self.step)

    @classmethod
    def parse(cls, text: object) -> WeightVersion | None:
        """What an engine says that it holds; None when no trainer has named it so."""
        run, _, step = str(text).rpartition(":")
        return cls(run, int(step)) if re.fullmatch("[0-9]{1,18}", step) else None

    def describe(self) -> str:
        """For people."""
        return f"run {self.run or 'without a name'} after step {self.step}"


@dataclass(frozen=True)
class VersionRange:
    """The weights of a run from `oldest` to `newest`, both included."""

    run: str
    oldest: int
    newest: int

    def __contains__(self, version: WeightVersion) -> bool:
        return version.run == self.run and self.oldest <= version.step <= self.newest


def run_name(output_dir: str) -> str:
    """A name for this start of a trainer: the run's folder, the machine, and what no other start has."""
    parts = (Path(output_dir).absolute().name, socket.gethostname())
    folder, host = (_NOT_PLAIN.sub("_", part)[:_MOST_CHARACTERS] for part in parts)
    return f"{folder}@{host}-{secrets.token_hex(4)}"
