"""What a solution's own process does: runs the program, or loads it and answers calls."""

import atexit
import builtins
import contextlib
import json
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any

from .frames import FrameError, write_all
from .plain import encode
from .remote import last_line, serving_all

_MODULES = (
    "abc", "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
    "io", "itertools", "json", "math", "operator", "os", "random", "re", "statistics", "string", "sys", "time",
    "typing",
)  # fmt: skip
# Platforms with `class Solution` import these for their users.
_STAR_IMPORTS = ("typing", "collections", "itertools", "functools", "heapq", "bisect", "math")


def preload(modules: Sequence[str]) -> None:
    """Import what most solutions import, once for all of them, and give programs what Python has when it starts alone.
    Raises ImportError."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site` does, which is not imported here.
    sys.set_int_max_str_digits(0)  # Judges have no such limit; that of processor time holds.
    for name in (*_MODULES, *modules):
        __import__(name)


def _module(name: str, code: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    if "class Solution" in code:
        for library in _STAR_IMPORTS:
            source = sys.modules[library]
            names = getattr(source, "__all__", None) or [key for key in vars(source) if not key.startswith("_")]
            vars(module).update({key: getattr(source, key) for key in names})
        vars(module).update({name: sys.modules[name] for name in _MODULES})
    return module


def _run(code: str, module: types.ModuleType) -> None:
    exec(compile(code, "solution.py", "exec", dont_inherit=True), vars(module))


def open_standard_streams() -> None:
    """Objects for whatever files will be descriptors 0 to 2 when a solution runs; made once, as that takes time."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = ["solution.py"]


def run_program(code: str) -> int:
    """Run the code as a script on the standard streams. Returns the exit status."""
    status = 0
    try:
        _run(code, _module("__main__", code))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
        _print_traceback()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # Programs may do all their work in a thread.
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        status = status or 1
        _print_traceback()
    return status


def call_function(code: str, name: str, arguments: Sequence[Any], answer: int) -> int:
    """Call one function of the code, or one method of its class Solution, and write what it returns to the descriptor
    `answer`. Returns the exit status."""
    try:
        module = _module("solution", code)
        _run(code, module)
        holder = module.Solution() if hasattr(module, "Solution") else module
        value = encode(getattr(holder, name)(*arguments), _refuse)
        write_all(answer, json.dumps(value).encode())
    except BaseException:
        _print_traceback()
        return 1
    return 0


def _refuse(value: Any) -> Any:
    raise TypeError(f"the function returned an object of {type(value).__name__}, not plain data")


def serve_module(code: str, reading: int, writing: int) -> int:
    """Load the code and let tests in another process use it until they end."""
    module = _module("solution", code)
    failure = None
    try:
        _run(code, module)
    except BaseException as error:
        failure = ImportError(f"the solution cannot be loaded: {last_line(error)}")

    def lookup(name: str) -> Any:
        if failure:
            raise failure
        try:
            return vars(module)[name]
        except KeyError:
            raise NameError(f"the solution does not define {name!r}") from None

    with contextlib.suppress(FrameError, OSError):
        serving_all(reading, writing).serve(lookup)
    return 0


def _print_traceback() -> None:
    with contextlib.suppress(BaseException):
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
