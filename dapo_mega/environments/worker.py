"""The program of a process in which environments live, each in a thread of its own for all its life.

It is started by `WorkerProcess`, as that of reward functions is. Calls arrive pickled, as (environment, method,
arguments), and answers leave as JSON when they are there, in any order.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import inspect
import os
import pickle
import resource
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from dapo_mega.algorithms.own_code import MisuseError, check_call, described, load_function, load_value
from dapo_mega.rewards.keeper import keep
from dapo_mega.rewards.processes import NUMBER
from dapo_mega.rewards.sandbox.frames import FrameError, framed, read_body, write_all, write_frame
from dapo_mega.rewards.worker import limit_memory

_MAX_DETAIL_CHARACTERS: Final = 20_000
_MAX_DEPTH: Final = 100
_STACK_BYTES: Final = 2**23
"""Enough for calls of Python through C as deep as Python allows (3.13: 5 MiB); it is not counted as memory."""
_M_ARENA_MAX: Final = -8

_Call = tuple[int, str, tuple[Any, ...]]


def main(requests_fd: int, answers_fd: int, lifeline_fd: int, source: Mapping[str, Any], memory_limit_mib: int) -> None:
    """Serve until the trainer closes the pipe of requests."""
    serve = partial(_serve, requests_fd, answers_fd, source, memory_limit_mib)
    keep(serve, lifeline_fd, requests_fd, answers_fd)


def _serve(requests: int, answers: int, source: Mapping[str, Any], memory_limit_mib: int) -> None:
    try:
        make = _factory(**source)
    except MisuseError as error:
        write_frame(answers, {"misuse": str(error), "number": 0})
        return
    threading.stack_size(_STACK_BYTES)
    # A thousand threads' heaps are to stay far below the limit, which is of the address space.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
    limit_memory(memory_limit_mib)
    with contextlib.suppress(ValueError):  # An environment of coroutines has three descriptors, and a loop.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    answer = _Answers(answers)
    answer(0, {"ready": True})
    environments: dict[int, SimpleQueue[_Call]] = {}
    while (request := read_body(requests, 2**32)) is not None:
        (number,) = NUMBER.unpack_from(request)
        environment, method, arguments = pickle.loads(memoryview(request)[NUMBER.size :])
        if method == "make":
            calls: SimpleQueue[_Call] = SimpleQueue()
            live = _Life(make, source["tools"] or source["path"], calls, answer).run
            try:
                threading.Thread(target=live, name=f"environment {environment}", daemon=True).start()
            except RuntimeError as error:
                answer(number, {"failure": f"no thread can be started for it: {error}", "detail": ""})
                continue
            environments[environment] = calls
            _allow(_STACK_BYTES)
        if method != "close":
            environments[environment].put((number, method, arguments))
        elif environment in environments:
            environments.pop(environment).put((number, method, arguments))
            _allow(-_STACK_BYTES)
        else:  # It was not made, or who opened it was cancelled before.
            answer(number, {})


def _allow(more_bytes: int) -> None:
    """Move the limit of the address space, where there is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        with contextlib.suppress(ValueError):  # More than the hard limit.
            resource.setrlimit(resource.RLIMIT_AS, (soft + more_bytes, hard))


def _factory(path: str, settings: Mapping[str, Any], tools: str | None) -> Callable[[], Any]:
    """What makes an environment. Raises MisuseError."""
    function = load_function(path, before_others=True)
    if tools:
        function = partial(function, load_value(tools, before_others=True))
    check_call(function, (), settings)
    return partial(function, **settings)


class _Answers:
    """Writes answers whole, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __call__(self, number: int, answer: Mapping[str, Any]) -> None:
        if os.getpid() != self._pid:  # A fork of the environment's that came back.
            os._exit(1)
        try:
            frame = framed({**answer, "number": number})
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"it returned what is not plain data: {error}"
            frame = framed({"failure": reason, "detail": "", "number": number})
        except FrameError as error:
            frame = framed({"failure": f"it returned too much: {error}", "detail": "", "number": number})
        with self._lock:
            write_all(self._descriptor, frame)


class _Life:
    """One environment, from `make` to `close`."""

    def __init__(self, make: Callable[[], Any], path: str, calls: SimpleQueue[_Call], answer: _Answers) -> None:
        self._make = make
        self._file = path.rpartition(":")[0]
        self._calls = calls
        self._answer = answer
        self._made: Any = None
        self._runner: asyncio.Runner | None = None

    def run(self) -> None:
        """Make each call when it comes. Where no answer can be given, the process ends."""
        try:
            self._run()
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc()
            os._exit(1)
        if self._runner:
            self._runner.close()

    def _run(self) -> None:
        method = ""
        while method != "close":
            number, method, arguments = self._calls.get()
            try:
                answer = self._call(method, *arguments)
            except MisuseError as error:
                answer = {"failure": str(error), "detail": ""}
            except BaseException as error:  # SystemExit of the environment too.
                where = "it" if method == "make" else f"its method {method}"
                answer = {"failure": f"{where} raises {type(error).__name__}", "detail": ""}
                with contextlib.suppress(Exception):  # Its text may be code that raises.
                    answer["failure"] = _plain(f"{where} raises {described(error, self._file)}")
                    answer["detail"] = _plain("".join(traceback.format_exception(error))[-_MAX_DETAIL_CHARACTERS:])
            self._answer(number, answer)

    def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        if method == "make":
            self._made = self._make()
            missing = [name for name in ("reset", "step") if not callable(getattr(self._made, name, None))]
            if missing:
                raise MisuseError(f"what it makes has no method {missing[0]}")
            if self._writes_snapshots != hasattr(self._made, "restore"):
                raise MisuseError("it has one of the methods snapshot and restore; give it both, or none")
            return {"tools": _plain(getattr(self._made, "tools", None) or [])}
        if method == "close":
            if hasattr(self._made, "close"):
                self._result(self._made.close())
            return {}
        if method == "restore":
            self._result(self._made.restore(base64.b64decode(arguments[0])))
            return {}
        observation = _plain(self._result(getattr(self._made, method)(*arguments)))
        state = self._result(self._made.snapshot()) if self._writes_snapshots else b""
        if not isinstance(state, bytes):
            raise MisuseError(f"its method snapshot returned {type(state).__name__}; it must return bytes")
        return {"observation": observation, "snapshot": base64.b64encode(state).decode()}

    @property
    def _writes_snapshots(self) -> bool:
        return hasattr(self._made, "snapshot")

    def _result(self, returned: Any) -> Any:
        """What a method returned, also one that is a coroutine."""
        if not inspect.isawaitable(returned):
            return returned
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_wait_for(returned))


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any, depth: int = 0) -> Any:
    """The value with numbers and arrays of numpy and torch as plain ones, and text that is UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # A program's output may have surrogates.
    if depth > _MAX_DEPTH:
        raise MisuseError(f"it returned what is nested more than {_MAX_DEPTH} times")
    if isinstance(value, Mapping):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
