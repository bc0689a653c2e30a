"""Names the weights in an engine by their run and step."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

_MOST_CHARACTERS = 40
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_NAMED = re.compile(r"(?:([A-Za-z0-9._@:-]{1,100}):)?([0-9]{1,18})")


@dataclass(frozen=True)
class WeightVersion:
    """Weights of a run after a step, as text `run:step`, or `step` for a run without a name."""

    run: str
    step: int

    def __str__(self) -> str:
        return f"{self.run}:{self.step}" if self.run else str(self.step)

    @classmethod
    def parse(cls, text: object) -> WeightVersion | None:
        """The version that an engine reports; None if no trainer has named it."""
        found = _NAMED.fullmatch(str(text))
        return cls(found[1] or "", int(found[2])) if found else None

    def describe(self) -> str:
        """The version in words, for messages."""
        return f"run {self.run or 'without a name'} after step {self.step}"


@dataclass(frozen=True)
class VersionRange:
    """Weight versions of a run from `oldest` to `newest`, both included."""

    run: str
    oldest: int
    newest: int

    def __contains__(self, version: WeightVersion) -> bool:
        return version.run == self.run and self.oldest <= version.step <= self.newest


def run_name(output_dir: str) -> str:
    """A unique name for this start of a trainer: the run's folder, the machine, and a random suffix."""
    parts = (Path(output_dir).absolute().name, socket.gethostname())
    folder, host = (_NOT_PLAIN.sub("_", part)[:_MOST_CHARACTERS] for part in parts)
    return f"{folder}@{host}-{secrets.token_hex(4)}"
