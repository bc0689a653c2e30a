"""launch/train_dapo.py, of which one rank is killed in the middle of its third weight update, the one after step 2
unless an evaluation had all of its engines, once.

The engines wait then, with an open session and generation paused, in a broadcast whose other end is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dapo_mega.cli import run_command
from dapo_mega.megatron.core.repairs import cpu_accelerator

cpu_accelerator.install()

from dapo_mega.commands import train as train_dapo  # noqa: E402
from dapo_mega.megatron.megatron_policy import MegatronPolicy  # noqa: E402
from dapo_mega.types import WeightBucket  # noqa: E402

FATAL_UPDATE, FATAL_BUCKET = 3, 3


def fatal_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Kills the first process that is about to send them: the engines have been told to receive them."""
    marker = Path(sys.argv[sys.argv.index("--config") + 1]).with_suffix(".killed")
    with contextlib.suppress(FileExistsError):
        marker.touch(exist_ok=False)
        time.sleep(1)  # Let the engines begin.
        os.kill(os.getpid(), signal.SIGKILL)
    yield from tensors


def make_an_update_fatal() -> None:
    weights = MegatronPolicy.weights
    num_updates = 0

    def fatal(policy: MegatronPolicy, *arguments: Any) -> Iterator[WeightBucket]:
        nonlocal num_updates
        num_updates += 1
        for number, bucket in enumerate(weights(policy, *arguments), 1):
            is_fatal = (num_updates, number) == (FATAL_UPDATE, FATAL_BUCKET) and bucket.tensors is not None
            yield replace(bucket, tensors=fatal_tensors(bucket.tensors)) if is_fatal else bucket

    MegatronPolicy.weights = fatal


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        make_an_update_fatal()
    run_command(train_dapo.main)
