"""Where in the code something happens."""

from __future__ import annotations

from types import FrameType

_DEPTH = 4
_PACKAGES = ("dapo_mega/", "megatron/core/", "transformer_engine/")


def place(frame: FrameType | None) -> str:
    """The innermost lines of this project, Megatron-Core and Transformer Engine."""
    found: list[str] = []
    while frame and len(found) < _DEPTH:
        file = frame.f_code.co_filename
        if "/rehearsal/" not in file:
            for package in _PACKAGES:
                if package in file:
                    found.append(f"{package}{file.rpartition(package)[2]}:{frame.f_lineno} {frame.f_code.co_name}")
                    break
        frame = frame.f_back
    return " < ".join(found)
