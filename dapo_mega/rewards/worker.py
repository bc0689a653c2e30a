"""The main loop of a verification process: sets its limits, then makes one comparison at a time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

Compare = Callable[[str, str], bool]

_MIB = 2**20


def start_worker(memory_limit_mib: int) -> None:
    """Initialise a worker: memory limit on top of what is mapped now, default signals, algebra imported.

    The import and a first parse happen here, so that no answer's time limit pays for them.
    """
    # The pool ends a worker by SIGTERM. Python's own handlers wait for the interpreter, which a huge integer
    # power can keep busy in C for minutes; the default action does not wait.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    from dapo_mega.rewards.algebra import latex_equal

    latex_equal("x+x", "2x")
    limit_memory(memory_limit_mib)


def limit_memory(memory_limit_mib: int) -> None:
    """Cap the address space at what is mapped now plus the limit, where the platform can (Linux)."""
    if sys.platform != "linux":
        return
    import resource

    from dapo_mega.rewards.sandbox.isolation import mapped_bytes

    limit = mapped_bytes() + memory_limit_mib * _MIB
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def ready() -> bool:
    """True, from a worker that could start."""
    return True


def run_comparison(compare: Compare, candidate: str, truth: str, time_limit_s: float) -> bool:
    """Make one comparison. The alarm ends this process even if its parent is gone."""
    if sys.platform == "win32":
        return bool(compare(candidate, truth))
    signal.setitimer(signal.ITIMER_REAL, 2 * time_limit_s + 5)
    try:
        return bool(compare(candidate, truth))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
