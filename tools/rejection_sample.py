"""Keep a model's own correct responses, to fine-tune on: `dapo-mega rejection-sample` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.rejection_sample import main

if __name__ == "__main__":
    run_command(main)
