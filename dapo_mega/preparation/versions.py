"""Versions of the packages that decide what a prepared dataset holds."""

from __future__ import annotations

from importlib import metadata

_PACKAGES = ("dapo_mega", "math-verify", "sympy", "pyarrow", "torch", "transformers")


def deciding_versions(*packages: str) -> dict[str, str]:
    """By name, those of `packages` (all that matter where none is named) that are installed."""
    found = {}
    for name in packages or _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
