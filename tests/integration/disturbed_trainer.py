"""launch/train_dapo.py, where one process fails, or gets a signal, at a moment that `DISTURBANCE` names."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any

from dapo_mega.commands import run_command
from dapo_mega.policy import cpu_accelerator

cpu_accelerator.install()

from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402

from dapo_mega import trainer  # noqa: E402
from launch import train_dapo  # noqa: E402

complete_step = trainer.complete_step


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fault(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the first line\nthe second line")


def stop_after_an_update(pipeline: trainer.Pipeline, metrics: dict[str, float]) -> None:
    if pipeline.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        while not pipeline.stop_requested():
            time.sleep(0.01)
    complete_step(pipeline, metrics)


if __name__ == "__main__":
    match os.environ["DISTURBANCE"], os.environ["RANK"]:
        case "common.pt", "0":
            TorchCommonSaveStrategy.save_common = full_disk
        case "forward pass", "1":
            GPTModel.forward = fault
        case "after an update", "1":
            trainer.complete_step = stop_after_an_update
    run_command(train_dapo.main)
