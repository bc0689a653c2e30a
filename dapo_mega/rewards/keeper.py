"""Runs code or a program of the user's own in a child of this process, which does nothing but end all that it has
started: when the child ends, or the trainer, even where a process is stopped or keeps the interpreter busy.

With the standard library alone, as it is a script too, for programs, of which there are many. Its arguments are the
descriptor of the lifeline, MiB of address space for each process, 0 for no limit, and the command.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def keep(serve: Callable[[], None], lifeline_fd: int, *descriptors: int) -> None:
    """Call `serve` in the child, and end as it does. The descriptors are its own; the end of the lifeline means that
    the trainer is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Orphans of the code become children of this process. A stopped process goes on when the trainer ends.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    keeper = os.getpid()
    child = os.fork()
    if not child:
        os.close(lifeline_fd)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        if os.getppid() == keeper:
            try:  # Without waiting for threads of the code.
                serve()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    threading.Thread(target=_end_with_trainer, args=(lifeline_fd,), daemon=True).start()
    ended = 0
    while ended != child:
        ended, status = os.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            _kill_children()
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # End as it did.
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(keeper, -code)
    os._exit(code)


def _end_with_trainer(lifeline_fd: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline_fd, 1)
    while True:  # Until the other thread has seen the end of all.
        _kill_children()
        time.sleep(0.005)


def _kill_children() -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as children:
            for pid in children.read().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _main(lifeline: str, limit_mib: str, *command: str) -> None:
    def become_the_command() -> None:
        if limit := int(limit_mib) * 2**20:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
            os._exit(127)

    keep(become_the_command, int(lifeline))


if __name__ == "__main__":
    _main(*sys.argv[1:])
