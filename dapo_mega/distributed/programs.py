"""Other programs that this process starts, each in a process group that does not outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path


class ProcessGroup:
    """A program in its own process group, which is killed when this process ends, whatever the cause."""

    def __init__(
        self, arguments: Sequence[str], variables: dict[str, str], log: Path | None, inherited: Sequence[int] = ()
    ) -> None:
        """Output is added to the file `log`, or goes where this process's goes. `inherited` are file descriptors that
        the program inherits."""
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(log, "ab", opener=partial(os.open, mode=0o600))) if log else None
            # It waits for a line and gets it when its guard is there: killed before that, this process leaves nothing.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", 'read -r _ && exec "$@" < /dev/null', "start", *map(str, arguments)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                pass_fds=inherited,
            )
        # Standard input ends with this process. SGLang's own parent watch misses children that are still starting.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$1"', "guard", str(self.pid)],
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError), self._process.stdin as line:
            line.write(b"\n")

    @property
    def pid(self) -> int:
        """The main process's id, which is also the group's."""
        return self._process.pid

    def status(self) -> int | None:
        """Exit status of the main process, None while it runs."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """SIGTERM to the main process, which ends its children."""
        if self.status() is None:
            self._process.terminate()

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic clock), then kill the rest of the group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.kill()
        self._guard.communicate()


def last_line(log: Path) -> str:
    """The last line that is not empty, at most 300 characters of it."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"
