"""The process above a program: it ends all that the program has started when that ends, or when the trainer does.

Run as a script, with the standard library alone, as there is one for every trajectory. Its arguments are the descriptor
of the lifeline, which closes when the trainer is gone; MiB of address space, 0 for no limit; and the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """End as the program does; 128 more than the number of the signal that ended it."""
    lifeline, limit_mib, *command = sys.argv[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # Orphans of the program become children of this process.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # It goes on when the trainer ends, if it was stopped.
    keeper = os.getpid()
    child = os.fork()
    if not child:
        os.close(int(lifeline))
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        if int(limit_mib):
            resource.setrlimit(resource.RLIMIT_AS, (int(limit_mib) * 2**20, int(limit_mib) * 2**20))
        try:
            if os.getppid() == keeper:
                os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(127)
    threading.Thread(target=_end_with_trainer, args=(int(lifeline),), daemon=True).start()
    ended = 0
    while ended != child:
        ended, status = os.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            _kill_children()
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _end_with_trainer(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    while True:  # Until the other thread has seen the end of all.
        _kill_children()
        time.sleep(0.005)


def _kill_children() -> None:
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in listed.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
