"""Prepare a run's data, tokenizer and a model with random weights: `dapo-mega prepare` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.prepare import main

if __name__ == "__main__":
    run_command(main)
