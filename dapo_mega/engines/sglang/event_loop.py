"""An asyncio loop in a thread of its own, for a caller that is not asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOP_TIMEOUT_S = 10.0
_MEANWHILE_S = 0.5


def report_fault(task: asyncio.Task[None]) -> None:
    """A done-callback that logs a task's unexpected exception, which nobody else would see."""
    if not task.cancelled() and (fault := task.exception()):
        logger.critical("%s ended with an unexpected exception: %r", task.get_name(), fault, exc_info=fault)


class LoopThread:
    """Runs coroutines in a second thread until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        self._thread.start()

    def _run_forever(self) -> None:
        """A task that raises SystemExit or KeyboardInterrupt ends with it; the others go on."""
        is_stopped = False
        while not is_stopped:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
                is_stopped = True

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine; the future's `result()` waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run the coroutine to its end. After `timeout_s` cancels it and raises TimeoutError."""
        future = self.start(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def call(self, function: Callable[[], T], timeout_s: float | None = None) -> T:
        """What the function returns, called in the second thread between the steps of all tasks."""

        async def called() -> T:
            return function()

        return self.run(called(), timeout_s)

    def complete(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None]) -> T:
        """Run the coroutine to its end, and call `meanwhile` in this thread at least every `_MEANWHILE_S`. What that
        raises cancels the coroutine, and is raised when it has ended."""
        task = self.call(lambda: asyncio.create_task(work))
        ended = self.start(asyncio.wait([task]))
        try:
            while not ended.done():
                meanwhile()
                wait([ended], _MEANWHILE_S)
        except BaseException:
            self.loop.call_soon_threadsafe(task.cancel)
            wait([ended])
            raise
        return task.result()

    def close(self) -> None:
        """Cancel the remaining tasks and end the thread."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self._thread.is_alive():
            self.run(cancel_all(), _STOP_TIMEOUT_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_STOP_TIMEOUT_S)
            self.loop.close()
