"""Packages that SGLang imports but never uses on the CPU: everything in them can be imported, nothing can be called.

Remove a stand-in when SGLang no longer imports its package on a CPU-only machine (0.5.23 does, also where the package
is an optional accelerator).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence


class StandIn(types.ModuleType):
    """A module, or a name in one: has every attribute; raises when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        # Capitalised names serve as base classes, in except clauses and as enumerations.
        value: object = (
            _StandInClass(name, (Exception,), {}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")
        )
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: object, **options: object) -> object:
        raise NotImplementedError(f"{self.__name__} needs a GPU; this environment only has a stand-in for its import")

    def __iter__(self) -> Iterator[object]:
        return iter(())


class _StandInClass(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{cls.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(self._prefix) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_for(package: str) -> Callable[[str], object]:
    """The `__getattr__` of a package without contents; its submodules can be imported too."""
    sys.meta_path.append(_Submodules(package))
    return StandIn(package).__getattr__
