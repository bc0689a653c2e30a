"""Lets tests use the functions and objects of a solution that runs in another process.

Plain data crosses as data. An object of the solution stays there, and the tests hold a `Remote` in its place. What a
test X cannot be calculated with one, as the solution would otherwise be told the expected value and asked for the
verdict. Two objects of the solution are compared by the solution.
"""

import builtins
import contextlib
import itertools
import operator
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from .frames import FrameError, read_frame, write_frame
from .plain import decode, encode

_MAX_ERROR_CHARACTERS = 500

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr, "set attribute": setattr,
    "item": operator.getitem, "set item": operator.setitem, "delete item": operator.delitem,
    "length": len, "iterate": iter, "next": next, "text": str, "repr": repr, "truth": bool, "absolute": abs,
    "equal": operator.eq, "less": operator.lt, "less or equal": operator.le,
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
}  # fmt: skip
_READING = frozenset(_OPERATIONS) - {"set item", "delete item", "set attribute"}
# Methods of plain data that give a verdict on their argument.
_VERDICTS = frozenset(
    {"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "is_integer", "equals"}
    | {"isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"}
    | {"isspace", "istitle", "isupper"}
)


class SolutionError(Exception):
    """An exception in the solution whose class the tests do not have, or the solution's end."""


class Peer:
    """One side of the connection: asks the other side, and serves it meanwhile."""

    def __init__(self, reading: int, writing: int, serves: frozenset[str], exports: Callable[[Any], bool]) -> None:
        """`serves`: the operations that the other side may ask for; `exports`: which objects it may hold."""
        self._reading = reading
        self._writing = writing
        self._serves = serves
        self._exports = exports
        self._objects: list[Any] = []
        self.num_asked = 0
        """Operations that the other side was asked for."""
        self.num_changes = 0
        """Those among them after which an object may have another length."""

    def ask(self, operation: str, *arguments: Any, named: dict[str, Any] | None = None) -> Any:
        """The result of an operation on the other side. Lists, sets and dictionaries among `arguments` get the content
        that they have there afterwards."""
        message = {"do": operation, "arguments": self._encoded(list(arguments)), "named": self._encoded(named or {})}
        self.num_asked += 1
        self.num_changes += operation not in _READING
        write_frame(self._writing, message)
        while True:
            answer = read_frame(self._reading)
            if not isinstance(answer, dict):
                raise SolutionError("the solution ended its process")
            if "do" not in answer:
                break
            self._serve(answer)
        if "error" in answer:
            error = _exception(*answer["error"])
            if isinstance(error, StopIteration) and operation != "next":
                raise SolutionError("StopIteration")  # It would end all(map(f, ...)) of a test as if all were true.
            raise error
        for argument, content in zip(arguments, self._decoded(answer["contents"]), strict=True):
            _refill(argument, content)
        return self._decoded(answer["value"])

    def serve(self, lookup: Callable[[str], Any]) -> None:
        """Answer until the other side closes. `lookup` finds what has a name."""
        self._lookup = lookup
        while (message := read_frame(self._reading)) is not None:
            self._serve(message)

    def _serve(self, message: dict[str, Any]) -> None:
        try:
            answer = self._done(message)
        except BaseException as error:
            answer = {"error": [type(error).__name__, _described(error)]}
        try:
            write_frame(self._writing, answer)
        except FrameError as error:
            write_frame(self._writing, {"error": ["ValueError", str(error)]})

    def _done(self, message: dict[str, Any]) -> dict[str, Any]:
        operation = message["do"]
        arguments = self._decoded(message["arguments"])
        named = self._decoded(message["named"])
        if operation not in self._serves:
            raise TypeError(f"the tests allow no {operation}")
        if operation == "name":
            return {"value": self._encoded(self._lookup(*arguments)), "contents": self._encoded([None])}
        if operation == "call":
            value = arguments[0](*arguments[1:], **named)
        else:
            value = _OPERATIONS[operation](*arguments)
        contents = [item if type(item) in (list, dict, set, bytearray) else None for item in arguments]
        return {"value": self._encoded(value), "contents": self._encoded(contents)}

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._handle)

    def _decoded(self, value: Any) -> Any:
        return decode(value, self._held)

    def _handle(self, value: Any) -> dict[str, int]:
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_handle")}
        if not self._exports(value):
            raise TypeError(f"tests cannot hand an object of {type(value).__name__} to a solution, only plain data")
        self._objects.append(value)
        return {"mine": len(self._objects) - 1}

    def _held(self, value: dict[str, Any]) -> Any:
        ((kind, number),) = value.items()
        if kind == "mine" and type(number) is int:
            return Remote(self, number)
        if kind == "yours" and type(number) is int and 0 <= number < len(self._objects):
            return self._objects[number]
        raise ValueError("not an encoded object")


def serving_all(reading: int, writing: int) -> Peer:
    """The solution's side."""
    return Peer(reading, writing, frozenset({"name", "call", *_OPERATIONS}), exports=lambda value: True)


def serving_calls(reading: int, writing: int) -> Peer:
    """The tests' side: the solution may call functions that were given to it as arguments."""
    return Peer(reading, writing, frozenset({"call"}), exports=callable)


def _asking(operation: str, *, of_remotes: bool = False) -> Callable[..., Any]:
    """A method of `Remote` that asks for an operation; `of_remotes`: with another object of the solution only."""

    def method(self: "Remote", *arguments: Any) -> Any:
        if of_remotes and not all(isinstance(argument, Remote) for argument in arguments):
            return NotImplemented
        return self._ask(operation, *arguments)

    return method


class Remote:
    """An object of the other side."""

    __slots__ = ("_handle", "_peer", "_told")

    def __init__(self, peer: Peer, handle: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_told", (-1, None))

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return object.__getattribute__(self, "_peer").ask(operation, self, *arguments)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return object.__getattribute__(self, "_peer").ask("call", self, *arguments, named=named)

    def __getattr__(self, name: str) -> Any:
        if name in _VERDICTS or name.startswith("__"):
            raise AttributeError(f"an object of the solution has no {name!r} that tests believe; return plain data")
        return self._ask("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set attribute", name, value)

    __getitem__ = _asking("item")
    __setitem__ = _asking("set item")
    __delitem__ = _asking("delete item")
    __next__ = _asking("next")
    __abs__ = _asking("absolute")
    __lt__ = _asking("less", of_remotes=True)
    __le__ = _asking("less or equal", of_remotes=True)
    __add__ = _asking("add", of_remotes=True)
    __sub__ = _asking("subtract", of_remotes=True)
    __mul__ = _asking("multiply", of_remotes=True)

    def _length(self) -> int | None:
        """What it says of its length, None for none: asked once until something may have changed it."""
        num_changes, length = object.__getattribute__(self, "_told")
        if num_changes != (now := object.__getattribute__(self, "_peer").num_changes):
            with contextlib.suppress(TypeError):
                length = None
                length = int(self._ask("length"))
            object.__setattr__(self, "_told", (now, length))
        return length  # type: ignore[no-any-return]

    def __len__(self) -> int:
        if (length := self._length()) is None:
            raise TypeError("the solution's object has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        """Its items. Raises SolutionError where they are not as many as it says."""
        length = self._length()
        iterator = self._ask("iterate")
        for count in itertools.count():
            try:
                item = iterator._ask("next")
            except StopIteration:
                if count != (length or count):
                    raise SolutionError(f"an object of length {length} gave {count} items") from None
                return
            if length is not None and count >= length:
                raise SolutionError(f"an object of length {length} gave more items")
            yield item

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __bool__(self) -> bool:
        return self._ask("truth") is True and self._length() != 0

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_handle"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask("equal", other) is True


def _exception(name: object, text: object) -> Exception:
    """The exception of the other side: of a class that Python has, or a SolutionError."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(str(text))
    return SolutionError(f"{name}: {text}")


def _described(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_ERROR_CHARACTERS]
    except BaseException:  # `__str__` may be the solution's.
        return "no message"


def last_line(error: BaseException) -> str:
    """An exception as one line."""
    try:
        text = "".join(traceback.format_exception_only(type(error), error))
    except BaseException:
        text = type(error).__name__
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]


def _refill(argument: Any, content: Any) -> None:
    """Give a list, set, dictionary or bytearray of ours the content that a call left in its copy."""
    if type(argument) is not type(content) or argument == content:
        return
    if isinstance(argument, list | bytearray):
        argument[:] = content
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(content)
