"""Event loops: a function in a thread beside one, and one within another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


_MOST_FREE = 64

_Call = tuple[Future[Any], Callable[[], Any]]


class _DaemonThreads(Executor):
    """Makes each call in a daemon thread that has no other one: one that hangs does not keep the process from ending.
    Threads are used again, as to start one costs as much as to ask an engine."""

    def __init__(self) -> None:
        self._free: list[SimpleQueue[_Call]] = []
        os.register_at_fork(after_in_child=self._free.clear)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            calls = self._free.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=self._work, args=(calls,), name="beside", daemon=True).start()
        calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def _work(self, calls: SimpleQueue[_Call]) -> None:
        is_kept = True
        while is_kept:
            future, call = calls.get()
            result, fault = None, None
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except Exception as error:
                    fault = error
                except BaseException as error:  # On the loop it would end all tasks.
                    fault = RuntimeError(f"a thread ended with {error!r}")
            # Free before the result is there, whose taker may make the next call.
            if is_kept := len(self._free) < _MOST_FREE:
                self._free.append(calls)
            if fault:
                future.set_exception(fault)
            elif not future.cancelled():
                future.set_result(result)
            del future, call, result, fault


DAEMON_THREADS = _DaemonThreads()


@contextlib.contextmanager
def outer_loop_set_aside() -> Iterator[None]:
    """Let this thread run a loop to its end, also within one that runs already, as that of a notebook's kernel does
    while a cell is executed. The outer loop stands still meanwhile, as during all of the cell."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


async def beside(function: Callable[[], T]) -> T:
    """What the function returns or raises. If the caller is cancelled, it goes on and nobody hears of it."""
    return await asyncio.get_running_loop().run_in_executor(DAEMON_THREADS, function)


class _Started(Executor):
    """Calls what starts something, at once, and has its future: nothing waits in a thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        found: Future[Any] = fn(*args, **kwargs)
        return found


_STARTED = _Started()


async def result_of(start: Callable[[], Future[T]]) -> T:
    """What comes of the future that `start` returns. A loop of engines waits for it as for what runs `beside` it."""
    return await asyncio.get_running_loop().run_in_executor(_STARTED, start)  # type: ignore[arg-type]
