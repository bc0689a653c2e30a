"""Console progress of a run: a live bar on a terminal, elsewhere a plain line each 10 seconds."""

import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

# label, metric name, format
RL_COLUMNS = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("accuracy", "rollout/accuracy_mean", ".3f"),
    ("length", "rollout/response_length_mean", ".0f"),
    ("entropy", "policy/entropy", ".3f"),
    ("tokens/s", "rollout/tokens_per_s", ".0f"),
)
_MISSING = "-"
# Terminal escape sequences, then control characters other than newline and tab.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NUM_TIMED_STEPS = 20
_SECONDS_BETWEEN_LINES = 10.0


class ProgressDisplay:
    """Shows how far the run is and its main metrics; a context manager.

    On a terminal it is a bar that redraws in place. Elsewhere it is lines without control codes: for the first and the
    last step of this start, and for others when the line before is 10 seconds old.
    Steps are counted from 1; 0 stands for the start. The time left is judged by the last 20 steps.
    """

    def __init__(
        self,
        num_steps: int,
        start_step: int = 0,
        *,
        columns: Sequence[tuple[str, str, str]] = RL_COLUMNS,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`columns` are (label, metric name, format); `stream` is where to show it, standard output if None.

        Raises ValueError for impossible counts.
        """
        if not 0 <= start_step <= num_steps:
            raise ValueError(f"start_step is {start_step} of {num_steps} steps; expected 0 <= start <= steps")
        self._columns = columns
        self._num_steps = num_steps
        self._num_done = start_step
        self._metrics: Mapping[str, float] = {}
        self._shown_position = ""
        self._clock = clock
        self._timed = deque([(start_step, clock())], maxlen=_NUM_TIMED_STEPS + 1)
        self._stream = sys.stdout if stream is None else stream
        self._next_line = clock()
        self._live: Live | None = None
        # Asked of the stream, not of rich: FORCE_COLOR makes rich take a log file for a terminal.
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            console = Console(file=self._stream, force_terminal=True, highlight=False)
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=1)

    def update(self, step: int, metrics: Mapping[str, float], position: str = "") -> None:
        """Show that `step` is finished, with its metrics; one that is missing shows as `-`. `position` is shown in
        place of the step."""
        self._metrics = dict(metrics)
        self._shown_position = position
        self._num_done = min(step, self._num_steps)
        self._timed.append((self._num_done, self._clock()))
        if self._live is not None:
            self._live.refresh()
        elif self._num_done == self._num_steps or self._clock() >= self._next_line:
            if not any(name in metrics for _, name, _ in self._columns):
                return
            self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
            self._print(f"{self._position()}  " + "  ".join(self._values()))

    def message(self, text: str) -> None:
        """Print `text` above the bar, without terminal control codes and without markup."""
        clean = _CONTROL.sub("", text)
        if self._live is None:
            self._print(clean)
        else:
            self._live.console.print(Text(clean))

    def __enter__(self) -> Self:
        self._timed[-1] = (self._num_done, self._clock())
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _render(self) -> Group:
        # Both fit any width: the values wrap between two of them, the bar shrinks. The bar comes last
        # because it does not end its line.
        text = Text("  ".join([self._position(), *self._values()]))
        return Group(text, ProgressBar(total=max(self._num_steps, 1), completed=self._num_done))

    def _position(self) -> str:
        return self._shown_position or f"step {self._num_done}/{self._num_steps}"

    def _values(self) -> list[str]:
        values = [f"{label}={_format(self._metrics.get(name), spec)}" for label, name, spec in self._columns]
        return [*values, f"ETA={self._time_left()}"]

    def _time_left(self) -> str:
        (first_step, first_time), (last_step, last_time) = self._timed[0], self._timed[-1]
        if last_step <= first_step:
            return _MISSING
        seconds_per_step = (last_time - first_time) / (last_step - first_step)
        left = timedelta(seconds=round(seconds_per_step * (self._num_steps - last_step)))
        # Without spaces, so that "1 day, 2:03:04" does not wrap in the middle.
        return str(left).replace(" ", "")


def _format(value: float | None, spec: str) -> str:
    if value is None:
        return _MISSING
    return format(value, spec) if math.isfinite(value) else str(float(value))
