"""The program of a process that compares answers: imports computer algebra once, and makes comparisons in a child.

The kernel ends the child when a comparison has used up its processor time; the next child is there at once.
"""

import base64
import json
import mmap
import os
import pickle
import resource
import signal
from collections.abc import Callable
from typing import Final

from dapo_mega.rewards.processes import NUMBER
from dapo_mega.rewards.sandbox.frames import read_body, write_frame
from dapo_mega.rewards.sandbox.isolation import end_with_parent, mapped_bytes
from dapo_mega.rewards.sandbox.worker import clock_limit_s

Compare = Callable[[str, str], bool]

_OVER_TIME: Final = (signal.SIGPROF, signal.SIGALRM)


def main(
    requests_fd: int, answers_fd: int, lifeline_fd: int, trainer: int, compare: str, memory_limit_mib: int
) -> None:
    """Serve until the trainer closes the pipe of requests. `compare` is a pickled function, in base64."""
    end_with_parent(trainer)
    os.close(lifeline_fd)
    # No answer's time pays for the imports and for the first parse.
    from dapo_mega.rewards.algebra import latex_equal

    latex_equal("x+x", "2x")
    function = pickle.loads(base64.b64decode(compare))
    is_busy = mmap.mmap(-1, 1 + NUMBER.size)  # Shared with the children. With the number of the request behind it.
    write_frame(answers_fd, {"ready": True, "number": 0})
    own_pid = os.getpid()
    while True:
        child = os.fork()
        if not child:
            end_with_parent(own_pid)
            limit_memory(memory_limit_mib)
            _serve(requests_fd, answers_fd, function, is_busy)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if is_busy[0]:
            is_busy[0] = 0
            over_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _OVER_TIME
            (number,) = NUMBER.unpack_from(is_busy, 1)
            write_frame(answers_fd, {"outcome": "timeout" if over_time else "crash", "number": number})
        elif status == 0:
            return


def _serve(requests: int, answers: int, compare: Compare, is_busy: mmap.mmap) -> None:
    while request := read_body(requests):
        candidate, truth, limit_s = json.loads(request[NUMBER.size :])
        is_busy[1:] = request[: NUMBER.size]
        is_busy[0] = 1
        # Their default actions end a process at once, also within a long call of C.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, clock_limit_s(limit_s))
        try:
            outcome = "correct" if compare(candidate, truth) else "wrong"
        except Exception:
            outcome = "crash"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_busy[0] = 0  # First: a child that ends in between must not be answered for twice.
        write_frame(answers, {"outcome": outcome, "number": NUMBER.unpack_from(request)[0]})


def limit_memory(memory_limit_mib: int) -> None:
    """Cap the address space at what is mapped now plus the limit."""
    limit = mapped_bytes() + memory_limit_mib * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
