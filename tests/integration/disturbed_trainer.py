"""launch/train_dapo.py, where one process fails, or gets a signal, at a moment that `DISTURBANCE` names."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from dapo_mega.cli import run_command
from dapo_mega.megatron.repairs import cpu_accelerator

cpu_accelerator.install()

from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402

from dapo_mega.commands import train as train_dapo  # noqa: E402
from dapo_mega.training import loop as trainer  # noqa: E402


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fault(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the first line\nthe second line")


def stopped_before(function: Callable[..., Any], step: int) -> Callable[..., Any]:
    """The function of the trainer's, before which this process gets SIGTERM after so many steps."""

    def call(training_run: trainer.TrainingRun, *arguments: Any) -> Any:
        if training_run.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not training_run.stop_requested():
                time.sleep(0.01)
        return function(training_run, *arguments)

    return call


if __name__ == "__main__":
    match os.environ["DISTURBANCE"], os.environ["RANK"]:
        case "common.pt", "0":
            TorchCommonSaveStrategy.save_common = full_disk
        case "forward pass", "1":
            GPTModel.forward = fault
        case "after an update", "1":
            trainer.complete_step = stopped_before(trainer.complete_step, 3)
        case "in the last evaluation", "0":
            trainer.evaluate = stopped_before(trainer.evaluate, 6)
    run_command(train_dapo.main)
