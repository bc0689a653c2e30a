"""Fine-tune a model on demonstrations, alone or under torchrun: `dapo-mega sft` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.sft import main

if __name__ == "__main__":
    run_command(main)
