"""Joins the trainer's process groups within a time limit.

An engine does nothing else while it joins, even if the trainer is killed meanwhile. torch would try to connect to the
trainer's store for half an hour, and wait forever for a store that accepts but does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from dapo_mega.distributed import accelerator
from dapo_mega.engines.sglang.weight_protocol import limit_of_group

_SGLANGS_LIMIT_S = 1800.0


def join_within_limit(join: Callable[..., Any], *arguments: Any, **group: Any) -> Any:
    """Call `join` in a thread; raises TimeoutError after the limit in the group's name, if there is one.

    The thread cannot be interrupted. It ends when torch gives up or the store's machine is gone.
    """
    limit_s = limit_of_group(str(group.get("group_name")))
    if limit_s is None:
        return join(*arguments, **group)
    # gloo fails a broadcast at this limit. With NCCL torch ends the process, so the trainer must give up earlier.
    gives_up_s = limit_s if group.get("backend") == "gloo" else min(4 * limit_s, _SGLANGS_LIMIT_S)
    group["timeout"] = timedelta(seconds=gives_up_s)
    device = accelerator.device()
    joined: Future[Any] = Future()

    def run() -> None:
        try:
            if device.index is not None:
                accelerator.select(device.index)  # The current device is per thread.
            joined.set_result(join(*arguments, **group))
        except Exception as error:  # Raised in the waiting thread.
            joined.set_exception(error)

    threading.Thread(target=run, name="joining a group", daemon=True).start()
    try:
        return joined.result(limit_s)
    except TimeoutError as error:
        raise TimeoutError(f"the trainer at {group.get('init_method')} did not come within {limit_s:g} s") from error
