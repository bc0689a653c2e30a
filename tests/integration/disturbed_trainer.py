"""launch/train_dapo.py, where a process fails, gets a signal or waits, at a moment that `DISTURBANCE` names; and
launch/train_sft.py, where `FINE_TUNING` is set."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from dapo_mega.cli import run_command
from dapo_mega.megatron.core.repairs import cpu_accelerator

cpu_accelerator.install()

from dapo_mega.commands import sft as train_sft  # noqa: E402
from dapo_mega.commands import train as train_dapo  # noqa: E402
from dapo_mega.errors import StopRequested  # noqa: E402
from dapo_mega.megatron.core.checkpoint_files import dist_checkpointing  # noqa: E402
from dapo_mega.megatron.core.decoder import PackedStage  # noqa: E402
from dapo_mega.megatron.megatron_policy import MegatronPolicy  # noqa: E402
from dapo_mega.training import loop as trainer  # noqa: E402
from dapo_mega.training.lifecycle import Saving  # noqa: E402
from dapo_mega.training.peers import POLL_S  # noqa: E402
from dapo_mega.training.trainer import Trainer  # noqa: E402


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fault(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the first line\nthe second line")


def stopped_before(function: Callable[..., Any], step: int) -> Callable[..., Any]:
    """The function of the loop's, before which this process gets SIGTERM after so many steps."""

    def call(training_run: trainer.TrainingRun, *arguments: Any) -> Any:
        if training_run.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(StopRequested):
                while True:
                    training_run.check_stop()
                    time.sleep(0.01)
        return function(training_run, *arguments)

    return call


def stop_in(name: str, step: int) -> None:
    """This process gets SIGTERM when it has obeyed this command after so many steps; the command ends when the others
    know."""
    command = getattr(Trainer, name)
    obey = command.alone

    def obeyed(self: Trainer, *arguments: Any, **named: Any) -> Any:
        found = obey(self, *arguments, **named)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(4 * POLL_S)
        return found

    command.alone = obeyed


def name_threads() -> None:
    """Each update prints the names of this process's threads of Python."""
    update = MegatronPolicy.update

    def named(policy: MegatronPolicy, *arguments: Any, **settings: Any) -> Any:
        print("threads:", *sorted(thread.name for thread in threading.enumerate()), flush=True)
        return update(policy, *arguments, **settings)

    MegatronPolicy.update = named


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_after(last_step: int, action: Callable[[], None] = lambda: None) -> None:
    """The run waits after this step, and its first process does this before: the checkpoint due then is under way,
    earlier ones are complete."""
    after_step = Saving.after_step

    def call(saving: Saving, step: int, **named: bool) -> None:
        if step == last_step:
            saving.trainer.finish_saving()
        after_step(saving, step, **named)
        while step == last_step:
            action()
            time.sleep(1)

    Saving.after_step = call


if __name__ == "__main__":
    match os.environ["DISTURBANCE"], os.environ["RANK"]:
        case "is killed after step 3", rank:
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                wait_after(3, die if rank == "0" else lambda: None)
        case "names its threads", _:
            name_threads()
        case "waits after step 3", _:
            wait_after(3)
        case "waits after step 4", _:
            wait_after(4)
        case "stops after step 7", "1":
            stop_in("finish_saving", 7)
        case "saving", "0":
            dist_checkpointing.save = full_disk
        case "forward pass", "1":
            PackedStage.forward = fault
        case "after an update", "1":
            stop_in("update", 3)
        case "in the last evaluation", "0":
            trainer.evaluate = stopped_before(trainer.evaluate, 6)
    run_command(train_sft.main if "FINE_TUNING" in os.environ else train_dapo.main)
