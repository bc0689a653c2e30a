"""Command a run from a process of its own: `dapo-mega control --config FILE [key=value ...]`, as for `train`.

The trainer finds it by the run's folder. With controller.own_process=true rank 0 starts one where none listens.
"""

import os
import pickle
import sys

from dapo_mega.cli import leave_at_sigterm, loading, run_command
from dapo_mega.commands._arguments import load_to_train, parse_training_arguments, prepare_megatron
from dapo_mega.config import RunConfig


def main() -> None:
    """Command the run that the arguments name, until it ends."""
    arguments = parse_training_arguments("Command a run from a process of its own, which trainers find by its folder.")
    if config := load_to_train(RunConfig, arguments):
        with loading():
            from dapo_mega.training.controller import control

        own = config.controller.model_copy(update={"own_process": True})
        control(config.model_copy(update={"controller": own}), accept_changes=arguments.accept_changes)


def _of_trainer() -> None:
    """Command the run of the trainer that has started this process, whose torchrun may be the second argument."""
    leave_at_sigterm("the run was stopped by SIGTERM before it began; start the same command again")
    prepare_megatron()
    with loading():
        from dapo_mega.training.controller import control

    config, accept_changes = pickle.load(sys.stdin.buffer)
    launcher = int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid()
    control(config, launcher=launcher, accept_changes=accept_changes)


if __name__ == "__main__":
    run_command(_of_trainer)
