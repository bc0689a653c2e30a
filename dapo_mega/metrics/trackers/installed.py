"""Which trackers' packages are there, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def missing_packages(backends: Sequence[str]) -> str | None:
    """One sentence that names the missing packages of these backends and the command that installs them; None if all
    are there."""
    missing = [name for name in backends if not _is_installed(name)]
    if not missing:
        return None
    packages = "package is" if len(missing) == 1 else "packages are"
    return (
        f"tracking.backends names {', '.join(missing)}, whose {packages} not installed; run: "
        f"pip install 'dapo_mega[{','.join(missing)}]' (in the project folder: pip install -e '.[{','.join(missing)}]')"
    )


def _is_installed(name: str) -> bool:
    # A folder of that name, which trackers themselves make in the working folder, is found too, but has no origin.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
