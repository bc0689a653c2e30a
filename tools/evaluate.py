"""Evaluate a checkpoint on held-out prompts: `dapo-mega evaluate` as a script, which needs no installed command."""

from dapo_mega.cli import run_command
from dapo_mega.commands.evaluate import main

if __name__ == "__main__":
    run_command(main)
