"""Runs a function in a thread beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _DaemonThreads(Executor):
    """Makes each call in a daemon thread of its own: one that hangs does not keep the process from ending."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See Executor."""
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


async def beside(function: Callable[[], T]) -> T:
    """What the function returns or raises. If the caller is cancelled, it goes on and nobody hears of it."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function)
