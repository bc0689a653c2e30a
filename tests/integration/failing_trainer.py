"""launch/train_dapo.py, where one process fails while the others are, or soon will be, in collectives without it."""

from __future__ import annotations

import errno
import os
from typing import Any

from dapo_mega.commands import run_command
from dapo_mega.policy import cpu_accelerator

cpu_accelerator.install()

from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402

from launch import train_dapo  # noqa: E402


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fault(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the first line\nthe second line")


if __name__ == "__main__":
    match os.environ["FAILURE"], os.environ["RANK"]:
        case "common.pt", "0":
            TorchCommonSaveStrategy.save_common = full_disk
        case "forward pass", "1":
            GPTModel.forward = fault
    run_command(train_dapo.main)
