"""Small files on disk that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write `path` so that readers, and a run after a crash, see the old or the new content, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
