"""Loads code of the user's own: FILE.py:NAME or package.module:NAME."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_SHOWN_CHARACTERS: Final = 200


class MisuseError(Exception):
    """Code of the user's own that cannot be used; the text says why, without its name."""


def load_function(path: str, *, before_others: bool = False) -> Callable[..., Any]:
    """What stands under this name, as `load_value`. Raises MisuseError if there is nothing to call."""
    function = load_value(path, before_others=before_others)
    if not callable(function):
        raise MisuseError(f"it is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def load_value(path: str, *, before_others: bool = False) -> Any:
    """What stands under this name. Its folder is looked in for what it imports: `before_others`, in a process of its
    own, or after all other folders. Raises MisuseError if there is nothing."""
    place, _, name = path.rpartition(":")
    module = _load_module(place, before_others=before_others)
    function = getattr(module, name, None)
    if function is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = get_close_matches(name, own, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(own) or 'no functions'}"
        raise MisuseError(f"there is no {name!r}; {hint}")
    return function


def check_call(function: Callable[..., Any], given: tuple[str, ...], settings: Mapping[str, Any]) -> None:
    """Raise MisuseError unless the function can be called with these positional arguments, by name here, and with the
    settings as keyword arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Of compiled code nothing is known before the call.
    try:
        signature.bind(*given, **settings)
    except TypeError as error:
        call = ", ".join([*given, *(f"{name}=..." for name in settings)])
        raise MisuseError(f"it takes {signature} and is called with ({call}): {error}") from None


def described(error: BaseException, place: str) -> str:
    """One line: the exception, and where in the user's file it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(place)]
    where = f" (line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        where = ""  # Its own text says so.
    text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def code_hash(path: str) -> str:
    """SHA-256 of the file that this name points to; empty where there is none, as of a compiled module."""
    place = path.rpartition(":")[0]
    try:
        spec = None if place.endswith(".py") else importlib.util.find_spec(place)
        file = spec.origin if spec else place
        return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()
    except (ImportError, OSError, ValueError):
        return ""


def _load_module(place: str, *, before_others: bool) -> ModuleType:
    try:
        if not place.endswith(".py"):
            sys.path.append(os.getcwd())  # For a module that lies where the run is started.
            return importlib.import_module(place)
        file = Path(place).absolute()
        if not file.is_file():
            raise MisuseError("the file does not exist; a relative path starts at the folder of the run's file")
        sys.path.insert(0 if before_others else len(sys.path), str(file.parent))
        # By its own name, so that processes that the function starts can import it, unless another module has it.
        found = importlib.util.find_spec(file.stem)
        is_own = found is not None and found.origin is not None and Path(found.origin) == file
        spec = importlib.util.spec_from_file_location(file.stem if is_own else f"{file.stem}_of_your_own", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except MisuseError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a script without a guard.
        raise MisuseError(f"it cannot be imported: {described(error, place)}") from error
