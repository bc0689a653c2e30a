"""Runs code of the user's own in a child of this process, which does nothing but end all that the code has started:
when the child ends, or the trainer, even where a process is stopped or keeps the interpreter busy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Final

from dapo_mega.rewards.processes import end_tree, kill_descendants

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def keep(serve: Callable[[], None], requests_fd: int, answers_fd: int, lifeline_fd: int) -> None:
    """Call `serve` in the child, and end as it does. The pipes are its own; the end of the lifeline means that the
    trainer is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Orphans of the code become children of this process. A stopped process goes on when the trainer ends.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    keeper = os.getpid()
    child = os.fork()
    if not child:
        os.close(lifeline_fd)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            _end_after(serve)
        os._exit(1)
    os.close(requests_fd)
    os.close(answers_fd)
    threading.Thread(target=_die_with_trainer, args=(lifeline_fd,), daemon=True).start()
    ended = 0
    while ended != child:
        ended, status = os.wait()
    kill_descendants(keeper)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # End as it did.
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(keeper, -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_trainer(lifeline_fd: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline_fd, 1)
    end_tree(os.getpid())


def _end_after(run: Callable[[], None]) -> None:
    """End this process afterwards, without waiting for threads of the code."""
    try:
        run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
