"""Wall-clock seconds of the stages of one training step."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dapo_mega.metrics.timeline import Activity, Span

_STAGE = re.compile(r"[a-z][a-z0-9_]*")


class StageTimers:
    """Accumulates the seconds spent in named stages, and the seconds of the whole step.

    Time is host time: a caller that wants a GPU's work included synchronises before the stage ends.
    A stage inside another one counts in both, so the stages may add up to more than the step. Each stage is also a
    span of the lane `trainer` of `activity`.
    """

    def __init__(self, activity: Activity | None = None) -> None:
        self._activity = activity or Activity()
        self._clock = self._activity.clock
        self._seconds: dict[str, float] = {}
        self._open: set[str] = set()
        self._step_start = self._clock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds of the with-block under `name`, also when it ends in an exception.

        Raises ValueError if `name` is malformed, is `step` (the total's name), or is already open.
        """
        if not _STAGE.fullmatch(name) or name == "step":
            raise ValueError(f"stage name {name!r} must be of lower-case letters, digits and '_', not 'step'")
        if name in self._open:
            raise ValueError(f"stage {name!r} is already open; its seconds would be counted twice")
        self._open.add(name)
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            self._activity.add("trainer", Span(name, start, end))
            self._open.remove(name)

    def summary(self) -> dict[str, float]:
        """`time/<stage>_s` of each stage closed since the last call, and `time/step_s`; then starts again.

        Seconds. The step lasts from the last call (or from construction) to this one. A stage that is
        still open counts in the step in which it closes.
        """
        now = self._clock()
        result = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        result["time/step_s"] = now - self._step_start
        self._seconds.clear()
        self._step_start = now
        return result
