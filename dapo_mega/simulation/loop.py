"""An event loop whose time is simulated: it passes when every task waits."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from dapo_mega.engines.lockstep import LockstepLoop
from dapo_mega.simulation.engines import SimulatedEngines

T = TypeVar("T")


class VirtualTimeLoop(LockstepLoop):
    """Its time is the clock of simulated engines. What would run beside it is done at once and takes no time."""

    def __init__(self, engines: SimulatedEngines) -> None:
        self._engines = engines
        super().__init__(lambda: engines.go_on(math.inf))

    def time(self) -> float:
        """The engines' clock, in seconds."""
        return self._engines.clock

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _when_all_wait(self, timeout: float | None) -> float:
        if timeout is None:
            return super()._when_all_wait(None)
        # A little later than the timer, as one that a rounded sum falls short of would never end.
        self._engines.go_on((self.time() + timeout) * (1 + 2**-50))
        return 0.0
