"""Command lines of this package's commands, for child processes."""

from __future__ import annotations

import sys


def dapo_mega(name: str, *arguments: str, processes: int = 1) -> list[str]:
    """`dapo-mega NAME ...` with this interpreter; training commands in so many processes of this machine."""
    several = ["--processes", str(processes)] if processes > 1 else []
    return [sys.executable, "-W", "ignore", "-m", "dapo_mega", name, *several, *arguments]
