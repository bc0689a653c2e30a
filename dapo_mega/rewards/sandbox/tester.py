"""What the tests' own process does: runs test code that uses a solution in another process.

The solution's process never has the test code, and this process never runs code of the solution.
"""

import ast
import builtins
import contextlib
import importlib
import sys
import types
import unittest
from typing import Any

from .remote import Peer, last_line

# Names that tests use without importing them because solutions usually do.
_LIBRARIES = ("math", "collections", "itertools", "functools", "typing", "heapq", "bisect", "re", "string", "operator")
_ALIASES = {"np": "numpy", "pd": "pandas"}

PASSED = b"passed"
FAILED = b"failed: "
UNUSABLE = b"unusable: "


def verdict(setup: str, code: str, entry_point: str, peer: Peer) -> bytes:
    """Run the tests of the solution that `peer` holds; `PASSED`, or what failed, or why they cannot be used."""
    try:
        tree = ast.parse(f"{setup}\n{code}" if setup else code)
        needed = _free_names(tree, entry_point)
        _require_a_test(tree, entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return UNUSABLE + last_line(error).encode()
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    sys.modules["solution"] = _SolutionModule("solution", peer)
    try:
        vars(module).update(_resolved(needed, peer))
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), vars(module))
        _run_defined_tests(module, entry_point)
    except BaseException as error:
        return FAILED + last_line(error).encode()
    return PASSED if peer.num_asked else UNUSABLE + b"the tests do not use the solution"


def _free_names(tree: ast.AST, entry_point: str) -> set[str]:
    """The names that the tests use and neither they nor Python define."""
    used, bound = set(), set(dir(builtins))
    for node in (*ast.walk(tree), *ast.walk(ast.parse(entry_point))):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.arg(arg=name):
                bound.add(name)
            case ast.alias(name=name, asname=alias):
                bound.add(alias or name.split(".")[0])
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    return used - bound


def _require_a_test(tree: ast.Module, entry_point: str) -> None:
    """Raises ValueError where nothing would be tested."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    runs = [part for node in tree.body if not isinstance(node, definitions) for part in ast.walk(node)]
    if any(isinstance(part, ast.Assert | ast.Call | ast.Raise) for part in runs):
        return
    if "check" in functions and not entry_point:
        raise ValueError("the tests define check(candidate), and there is no entry point")
    has_cases = any(isinstance(node, ast.ClassDef) for node in tree.body)
    if not has_cases and not any(name.startswith("test") or name == "check" for name in functions):
        raise ValueError("the tests test nothing")


def _resolved(needed: set[str], peer: Peer) -> dict[str, Any]:
    """Values of free names: from Python's library where it has the name, from the solution otherwise.

    A solution that could give tests their `math` or `Counter` could pass them all. A library's name is the solution's
    only where the tests use no other name of the solution.
    """
    found: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name in needed:
        module = _ALIASES.get(name, name)
        if module in sys.stdlib_module_names or name in _ALIASES:
            found[name] = importlib.import_module(module)
            continue
        for library in _LIBRARIES:
            if name in getattr(importlib.import_module(library), "__all__", ()) or (
                library == "math" and hasattr(importlib.import_module("math"), name)
            ):
                shared[name] = getattr(importlib.import_module(library), name)
    own = needed - found.keys() - shared.keys()
    if own:
        found.update(shared)
    for name in own or shared:
        with contextlib.suppress(NameError):  # Raised again where the tests come to it.
            found[name] = peer.ask("name", name)
    return found


class _SolutionModule(types.ModuleType):
    def __init__(self, name: str, peer: Peer) -> None:
        super().__init__(name)
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("name", name)


def _run_defined_tests(module: types.ModuleType, entry_point: str) -> None:
    """Call what test code defines and does not call: check(candidate), test functions, test cases."""
    names = vars(module)
    if entry_point and isinstance(names.get("check"), types.FunctionType):
        names["check"](eval(compile(entry_point, "entry_point", "eval", dont_inherit=True), names))
    for name, value in list(names.items()):
        if name.startswith("test") and isinstance(value, types.FunctionType):
            value()
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            if not result.wasSuccessful() or not result.testsRun:
                texts = [text for _, text in result.failures + result.errors] or [f"{name} ran no test"]
                raise AssertionError(texts[0].strip().splitlines()[-1])
