"""dapo_mega: DAPO (arXiv 2503.14476) on Megatron-Core, the same code on a laptop's CPU and on a cluster."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "grade", "load", "read_metrics", "read_samples"]


def __getattr__(name: str) -> Any:
    """The names of `library`, which are loaded when they are used."""
    if name not in __all__:
        raise AttributeError(f"module 'dapo_mega' has no attribute {name!r}; it has {', '.join(__all__)}")
    from dapo_mega import library

    return getattr(library, name)
