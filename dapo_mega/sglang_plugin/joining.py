"""Joins the trainer's process groups within a time limit.

An engine does nothing else while it joins, even if the trainer is killed meanwhile. torch would try to connect to the
trainer's store for half an hour, and wait forever for a store that accepts but does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from dapo_mega.distributed import accelerator
from dapo_mega.engines.sglang.weight_protocol import PATIENCE, limit_of_group

_SGLANGS_LIMIT_S = 1800.0
T = TypeVar("T")


def join_within_limit(join: Callable[..., Any], *arguments: Any, **group: Any) -> Any:
    """Call `join` in a thread; raises TimeoutError after the limit in the group's name, if there is one.

    The thread cannot be interrupted. It ends when torch gives up or the store's machine is gone.
    """
    limit_s = limit_of_group(str(group.get("group_name")))
    if limit_s is None:
        return join(*arguments, **group)
    # gloo fails a broadcast at this limit. With NCCL torch ends the process, so the trainer must give up earlier.
    group["timeout"] = timedelta(seconds=min(PATIENCE * limit_s, _SGLANGS_LIMIT_S))
    return call_within(limit_s, lambda: join(*arguments, **group), f"the trainer at {group.get('init_method')}")


def call_within(limit_s: float, function: Callable[[], T], awaited: str) -> T:
    """Call the function in a thread. Raises what it raises, and TimeoutError after the limit, which says that `awaited`
    did not come."""
    device = accelerator.device()
    joined: Future[T] = Future()

    def run() -> None:
        try:
            if device.index is not None:
                accelerator.select(device.index)  # The current device is per thread.
            joined.set_result(function())
        except Exception as error:  # Raised in the waiting thread.
            joined.set_exception(error)

    threading.Thread(target=run, name="joining a group", daemon=True).start()
    try:
        return joined.result(limit_s)
    except TimeoutError as error:
        if joined.done():
            raise
        raise TimeoutError(f"{awaited} did not come within {limit_s:g} s") from error
