"""Errors that a user can mend, each one line: what was given, what is allowed, what to do."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave cannot be used (configuration, file, data, checkpoint). Commands print it as
    one line and exit with status 2; anything else is a fault of the program and keeps its traceback."""


class StarvedError(RuntimeError):
    """Dynamic sampling ran out of generation rounds before it held enough groups."""


class FleetError(RuntimeError):
    """The rollout engines cannot go on: too few for too long, or they do not compute what the run needs."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether this is what is seen of another process's end: gloo and NCCL have no error of their own for it."""
    text = str(error)
    is_of_library = isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    return isinstance(error, ConnectionError) or is_of_library


class StopRequested(RuntimeError):
    """The run was asked to stop (SIGTERM) and can be continued by the same command."""
