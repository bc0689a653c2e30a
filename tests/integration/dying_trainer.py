"""launch/train_dapo.py, whose rank 0 is killed in the middle of its third weight update, the one after step 2, once.

The engines wait then, with an open session and generation paused, in a broadcast whose other end is gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dapo_mega.cli import run_command
from dapo_mega.megatron.core.repairs import cpu_accelerator

cpu_accelerator.install()

from dapo_mega.commands import train as train_dapo  # noqa: E402
from dapo_mega.megatron.megatron_policy import MegatronPolicy  # noqa: E402
from dapo_mega.types import WeightBucket  # noqa: E402

FATAL_UPDATE, FATAL_BUCKET = 3, 3


def fatal_tensors() -> Iterator[torch.Tensor]:
    """Kills the process that is about to send them: the engines have been told to receive them."""
    time.sleep(1)  # Let the engines begin.
    os.kill(os.getpid(), signal.SIGKILL)
    yield torch.empty(0)


def make_an_update_fatal() -> None:
    weights = MegatronPolicy.weights
    num_updates = 0

    def fatal(policy: MegatronPolicy, *arguments: Any) -> Iterator[WeightBucket]:
        nonlocal num_updates
        num_updates += 1
        for number, bucket in enumerate(weights(policy, *arguments), 1):
            is_fatal = (num_updates, number) == (FATAL_UPDATE, FATAL_BUCKET)
            yield replace(bucket, tensors=fatal_tensors()) if is_fatal else bucket

    MegatronPolicy.weights = fatal


if __name__ == "__main__":
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0"):
        make_an_update_fatal()
    run_command(train_dapo.main)
