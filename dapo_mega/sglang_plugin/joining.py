"""Joins the trainer's process groups within a time limit.

An engine does nothing else while it joins, even if the trainer is killed meanwhile. torch would try to connect to the
trainer's store for half an hour, and wait forever for a store that accepts but does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from dapo_mega.distributed import accelerator
from dapo_mega.distributed.event_loops import DAEMON_THREADS
from dapo_mega.engines.sglang.weight_protocol import PATIENCE, limit_of_group

_SGLANGS_LIMIT_S = 1800.0


def join_within_limit(join: Callable[..., Any], *arguments: Any, **group: Any) -> Any:
    """Call `join` in a thread; raises TimeoutError after the limit in the group's name, if there is one.

    The thread cannot be interrupted. It ends when torch gives up or the store's machine is gone.
    """
    limit_s = limit_of_group(str(group.get("group_name")))
    if limit_s is None:
        return join(*arguments, **group)
    # gloo fails a broadcast at this limit. With NCCL torch ends the process, so the trainer must give up earlier.
    group["timeout"] = timedelta(seconds=min(PATIENCE * limit_s, _SGLANGS_LIMIT_S))
    device = accelerator.device()

    def run() -> Any:
        if device.index is not None:
            accelerator.select(device.index)  # The current device is per thread.
        return join(*arguments, **group)

    joined = DAEMON_THREADS.submit(run)
    try:
        return joined.result(limit_s)
    except TimeoutError as error:
        if joined.done():
            raise
        raise TimeoutError(f"the trainer at {group.get('init_method')} did not come within {limit_s:g} s") from error
