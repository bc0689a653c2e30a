"""Train with DAPO: `dapo-mega train --processes N --config configs/quickstart.yaml [key=value ...]`.

The same code as `launch/train_dapo.py`, which torchrun takes. Also runs as a single process. Resumes if the run's
folder has a checkpoint.
"""

from dapo_mega.cli import loading
from dapo_mega.commands._arguments import load_to_train, parse_training_arguments


def main() -> None:
    arguments = parse_training_arguments("Train a policy with DAPO on Megatron-Core.")
    from dapo_mega.config import RunConfig

    if config := load_to_train(RunConfig, arguments):
        with loading():
            from dapo_mega.training.run import run_training

        run_training(config, accept_changes=arguments.accept_changes)
