"""Event loops: a function in a thread beside one, and one within another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _DaemonThreads(Executor):
    """Makes each call in a daemon thread of its own: one that hangs does not keep the process from ending."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # On the loop it would end all tasks.
                future.set_exception(RuntimeError(f"a thread ended with {error!r}"))

        threading.Thread(target=run, name="scoring", daemon=True).start()
        return future


_THREADS = _DaemonThreads()


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
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function)
