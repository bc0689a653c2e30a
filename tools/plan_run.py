"""Estimate what a configuration's layout costs: `dapo-mega plan` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.plan import main

if __name__ == "__main__":
    run_command(main)
