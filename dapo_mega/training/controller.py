"""The controller in a process of its own: how the trainer's rank 0 finds or starts it, and what it does.

It writes where it listens, with a key that only its user can read, to `controller.json` in the run's folder. When the
trainer's processes die, it keeps the engines and their requests, and waits for the next ones: those that torchrun
starts again, or those of the same command.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from dapo_mega.atomic_files import read_json_object, replace_file
from dapo_mega.cli import EXIT_CONTINUE, LAUNCHER, is_started_by_torchrun, leave, print_once
from dapo_mega.config import RunConfig
from dapo_mega.distributed.links import Links, connect
from dapo_mega.distributed.stores import is_local
from dapo_mega.errors import FleetError, InputError, TrainerLost
from dapo_mega.training.build import make_rewards, read_inputs, try_rewards
from dapo_mega.training.lifecycle import watched
from dapo_mega.training.trainer import Trainer

ADDRESS_FILE = "controller.json"
_POLL_S = 0.2
_OF_TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def linked(config: RunConfig, accept_changes: bool, check_stop: Callable[[], None]) -> Connection:
    """On rank 0: the connection to the run's controller, which is started here unless one listens already, or is to on
    another machine. Raises FleetError where there is none in time, and StopRequested as `check_stop` does."""
    file = Path(config.output_dir) / ADDRESS_FILE
    deadline = time.monotonic() + config.controller.wait_limit_s
    started: subprocess.Popen[bytes] | None = None
    while time.monotonic() < deadline:
        check_stop()
        with contextlib.suppress(OSError, InputError, KeyError, ValueError, EOFError, AuthenticationError):
            found = read_json_object(file)
            address = str(found["host"]), int(found["port"])
            return connect(address, str(found["key"]), config.silence_limit_s)
        if started is None and is_local(config.controller.host):
            started = _start(config, accept_changes)
        elif started is not None and (status := started.poll()) is not None:
            raise FleetError(f"the controller has ended at its start with status {status}; see its output above")
        time.sleep(_POLL_S)
    raise FleetError(
        f"no controller listens as {file} says after {config.controller.wait_limit_s:g} s (controller.wait_limit_s); "
        f"start one with dapo-mega control, or set controller.host=127.0.0.1"
    )


def _start(config: RunConfig, accept_changes: bool) -> subprocess.Popen[bytes]:
    """Start a controller that outlives this process: torchrun ends its own processes only."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)}
    launcher = [str(LAUNCHER)] if is_started_by_torchrun() else []
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "dapo_mega.commands.control", "--of-trainer", *launcher],
        stdin=subprocess.PIPE,
        env={**variables, "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )
    assert process.stdin
    with process.stdin:
        process.stdin.write(pickle.dumps((config, accept_changes)))
    return process


def control(config: RunConfig, *, launcher: int | None = None, accept_changes: bool = False) -> None:
    """Command a run from this process. With `launcher` it ends when that process, a trainer's torchrun, has ended and
    no trainer is there. Raises what the run ends with."""
    from dapo_mega.training.run import command_run, is_finished

    folder = Path(config.output_dir)
    with watched(config) as (status, watch):
        if is_finished(config, status, accept_changes):
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal's Ctrl-C reaches the trainers, which pass it on.
        links = Links(config.controller.host, config.silence_limit_s)

        def check() -> None:
            watch.check_stop()
            if launcher and not psutil.pid_exists(launcher):
                leave("the trainer's processes have ended; start the same command again to continue", EXIT_CONTINUE)

        def check_stop() -> None:
            watch.check_stop()
            links.check_stop()

        def meet() -> None:
            os.environ["LOCAL_RANK"] = "0"  # Without a trainer, this process is the one that speaks.
            links.meet(config.controller.wait_limit_s, check)
            os.environ["LOCAL_RANK"] = "controller"

        folder.mkdir(parents=True, exist_ok=True)
        file = folder / ADDRESS_FILE
        host, port = links.address
        replace_file(file, json.dumps({"host": host, "port": port, "key": links.key}), mode=0o600)
        try:
            meet()
            trainer = Trainer(config, None, watch.begin_training, elsewhere=links)
            with trainer.commanding():
                inputs = read_inputs(config)
                print_once(inputs.preview)
                rewards = make_rewards(config)
                try_rewards(config, rewards, inputs.train_prompts.prompts[0])
                command_run(config, trainer, inputs, rewards, status, check_stop, meet)
        except TrainerLost as lost:
            os.environ["LOCAL_RANK"] = "0"
            leave(f"{lost}; start the same command again to continue from the last checkpoint", EXIT_CONTINUE)
        finally:
            file.unlink(missing_ok=True)
            links.close()
