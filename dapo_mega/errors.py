"""Errors that a user can correct, each one line: what was given, what is allowed, what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class InputError(ValueError):
    """Something the user gave cannot be used (configuration, file, data, checkpoint). Commands print one line and exit
    with status 2; other exceptions are bugs and keep their traceback."""


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """An InputError within says at which step."""
    try:
        yield
    except InputError as error:
        raise InputError(f"step {step}: {error}") from None


class StarvedError(RuntimeError):
    """Dynamic sampling ran out of generation rounds before it held enough groups."""


class FleetError(RuntimeError):
    """The rollout engines cannot be used: too few for too long, or their log-probs are not the trainer's."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error shows that another process has ended; gloo and NCCL have no error class for this."""
    text = str(error)
    is_of_library = isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    # torch's class, by name as torch is not imported here; a store that was never reached is another fault.
    is_of_store = type(error).__name__ == "DistNetworkError" and "to connect" not in text
    return isinstance(error, ConnectionError) or is_of_library or is_of_store


class TrainerLost(RuntimeError):
    """The trainer's processes have ended, and the process that commands them lives: another trainer may come."""


class StopRequested(RuntimeError):
    """The run was asked to stop (SIGTERM), and the same command continues it."""
