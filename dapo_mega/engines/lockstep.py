"""An event loop for engines that work in the caller's own thread: they take their turn when every task waits."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from dapo_mega.distributed.event_loops import outer_loop_set_aside

T = TypeVar("T")

_POLL_S = 0.2


class LockstepLoop(asyncio.SelectorEventLoop):
    """Runs tasks until all of them wait, and then calls `step`, which answers requests. What runs beside the loop, in
    an executor, ends before engines go on, so results do not depend on its speed. Time stands still: no timer ends."""

    def __init__(self, step: Callable[[], bool], check_stop: Callable[[], None] = lambda: None) -> None:
        """`step` returns whether there was something to answer. `check_stop` is called during waits and may raise
        StopRequested; what it or `step` raises, `complete` raises."""
        self._step = step
        self._check_stop = check_stop
        self._beside: set[asyncio.Future[Any]] = set()
        super().__init__(_Selector(self._when_all_wait))

    def time(self) -> float:
        return 0.0

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._beside.add(future)
        future.add_done_callback(self._beside.discard)
        return future

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end; it is cancelled when a step or the stop raises."""
        task = self.create_task(work)
        with outer_loop_set_aside():
            try:
                return self.run_until_complete(task)
            except BaseException:
                task.cancel()
                with contextlib.suppress(BaseException):
                    self.run_until_complete(task)
                raise

    def shut(self) -> None:
        """Cancel what is left, and close."""
        if self.is_closed():
            return
        self._check_stop = lambda: None
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            with outer_loop_set_aside():
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()

    def _when_all_wait(self, timeout: float | None) -> float:
        """How long to wait for what runs beside the loop; `timeout` is the time until the next timer."""
        if self._beside:
            self._check_stop()
            return _POLL_S
        if not self._step():
            raise RuntimeError("every task waits, and no request is open")
        return 0.0


class _Selector(selectors.DefaultSelector):
    """Asks how long to wait when no task is ready: only then it is asked to wait."""

    def __init__(self, when_all_wait: Callable[[float | None], float]) -> None:
        super().__init__()
        self._when_all_wait = when_all_wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wait_s = 0.0 if timeout == 0 else self._when_all_wait(timeout)
        return super().select(wait_s) if wait_s else []
