"""Supervised fine-tuning: `dapo-mega sft --processes N --config configs/quickstart_sft.yaml [key=value ...]`.

The same code as `launch/train_sft.py`, which torchrun takes. Resumes if the run's folder has a checkpoint.
"""

from dapo_mega.cli import loading
from dapo_mega.commands._arguments import load_to_train, parse_training_arguments


def main() -> None:
    arguments = parse_training_arguments("Fine-tune a model on demonstrations with Megatron-Core.")
    from dapo_mega.config import SftConfig

    if config := load_to_train(SftConfig, arguments):
        with loading():
            from dapo_mega.training.sft import run_sft

        run_sft(config, accept_changes=arguments.accept_changes)
