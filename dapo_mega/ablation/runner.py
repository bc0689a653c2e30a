"""Carries out a plan: runs as child processes, one after the other or some at a time, until all are settled or a signal
comes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_mega.ablation.outcomes import METRICS_FILE, Outcome, outcome_of, records_of
from dapo_mega.ablation.plan import Plan, Run
from dapo_mega.ablation.tasks import ENVIRONMENT
from dapo_mega.distributed.programs import ProcessGroup, last_line
from dapo_mega.errors import InputError
from dapo_mega.metrics import ProgressDisplay

_POLL_S = 0.5
_PATIENCE_S = 15.0
"""What a run gets on top of its `checkpoint.grace_s` to end by itself after SIGTERM."""


class Stop:
    """Remembers the first SIGTERM or Ctrl-C."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._came = threading.Event()

    def listen(self) -> None:
        """From now on these signals are remembered, and do nothing else. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come, at most so many seconds later."""
        return self._came.wait(seconds)

    def _handle(self, number: int, _: object) -> None:
        self.number = self.number or signal.Signals(number)
        self._came.set()


@dataclass
class _Child:
    run: Run
    group: ProcessGroup
    log: Path
    seen_bytes: int = -1


class Runner:
    """Starts what is not settled, in the plan's order, at most `parallel` at a time.

    `command` makes a run's command line. `on_end` is called after each run that ended by itself. `outcomes` says by a
    run's name how far it is.
    """

    def __init__(
        self,
        plan: Plan,
        stop: Stop,
        *,
        parallel: int = 1,
        command: Callable[[Run], Sequence[str]] | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._plan = plan
        self._stop = stop
        self._parallel = parallel
        self._command = command or (lambda run: run.command(plan.processes))
        self._on_end = on_end
        self.outcomes = {run.name: outcome_of(run) for run in plan.runs}
        self._waiting = [run for run in plan.runs if not self.outcomes[run.name].is_settled]
        self._children: list[_Child] = []

    def work(self) -> None:
        """Returns when every run has ended, or when a signal has come and all children have ended."""
        num_steps = sum(run.config.num_steps for run in self._plan.runs)
        with ProgressDisplay(num_steps, self._num_done()) as progress:
            try:
                while (self._waiting or self._children) and not self._stop.wait(_POLL_S):
                    while self._waiting and len(self._children) < self._parallel:
                        self._start(self._waiting.pop(0), progress)
                    for child in list(self._children):
                        self._look_at(child, progress)
            finally:
                self._end_all(progress)

    def _start(self, run: Run, progress: ProgressDisplay) -> None:
        log = self._plan.output / "logs" / f"{run.arm.group}-{run.arm.name}-seed{run.seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        before = self.outcomes[run.name]
        how = f"continues after step {before.step}" if before.step else "begins"
        progress.message(f"{self._place(run)}: {how}, log {log}")
        group = ProcessGroup(self._command(run), child_environment(self._plan), log)
        self._children.append(_Child(run, group, log))

    def _look_at(self, child: _Child, progress: ProgressDisplay) -> None:
        """Show the child's new steps, and take it off the list when it has ended."""
        has_ended = child.group.status() is not None
        file = child.run.folder / METRICS_FILE
        num_bytes = file.stat().st_size if file.is_file() else -1
        if num_bytes != child.seen_bytes and (records := records_of(child.run.folder)):
            step = int(records[-1]["step"])
            self.outcomes[child.run.name] = Outcome("begun", step)
            position = f"{self._place(child.run)}  step {step}/{child.run.config.num_steps}"
            progress.update(self._num_done(), records[-1], position)
        child.seen_bytes = num_bytes
        if not has_ended:
            return
        self._children.remove(child)
        child.group.end(time.monotonic())
        outcome = outcome_of(child.run)
        if not outcome.is_settled:
            reason = outcome.message if outcome.state == "failed" else last_line(child.log)
            outcome = Outcome("failed", outcome.step, reason)
        self.outcomes[child.run.name] = outcome
        why = f": {outcome.message}" if outcome.message else ""
        progress.message(f"{self._place(child.run)}: {outcome.state} after step {outcome.step}{why}")
        self._on_end()

    def _end_all(self, progress: ProgressDisplay) -> None:
        """SIGTERM to all children, time to save their last step, then SIGKILL."""
        for child in self._children:
            child.group.ask_to_end()
        grace_s = max((child.run.config.checkpoint.grace_s for child in self._children), default=0.0)
        deadline = time.monotonic() + grace_s + _PATIENCE_S
        for child in self._children:
            child.group.end(deadline)
            outcome = outcome_of(child.run)
            self.outcomes[child.run.name] = outcome
            progress.message(f"{self._place(child.run)}: stopped after step {outcome.step}")
        self._children.clear()

    def _place(self, run: Run) -> str:
        return f"run {self._plan.runs.index(run) + 1} of {len(self._plan.runs)}, {run.name}"

    def _num_done(self) -> int:
        """Steps that nobody has to wait for any more, over all runs."""
        waiting = {run.name for run in (*self._waiting, *(child.run for child in self._children))}
        return sum(
            self.outcomes[run.name].step if run.name in waiting else run.config.num_steps for run in self._plan.runs
        )


def make_cold_start(plan: Plan, stop: Stop) -> bool:
    """Make what all runs start from; False if a signal came. Raises InputError if one of its commands fails.

    A record says which commands have made it, so that they are not run again.
    """
    if plan.task is None:
        return True
    commands = plan.task.commands(plan.cold_start, plan.processes)
    # Without the interpreter, which may move.
    content = "".join(" ".join(command[1:]) + "\n" for command in commands)
    record = plan.cold_start / "commands.txt"
    if record.is_file() and record.read_text() == content:
        return True
    plan.cold_start.mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(commands, 1):
        print(f"cold start, part {number} of {len(commands)}", flush=True)
        group = ProcessGroup(command, child_environment(plan), None)
        while group.status() is None and not stop.wait(_POLL_S):
            pass
        group.ask_to_end()
        group.end(time.monotonic() + _PATIENCE_S + 30.0)
        if stop.wait(0):
            return False
        if group.status() != 0:
            raise InputError(f"the cold start in {plan.cold_start} failed; the lines above say why")
    record.write_text(content)
    return True


def child_environment(plan: Plan) -> dict[str, str]:
    """The environment of a run: this process's, with what the task needs."""
    return {**os.environ, **(ENVIRONMENT if plan.task else {})}
