"""Repeat the paper's Table 1 and compare all methods: `dapo-mega ablate` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.ablate import main

if __name__ == "__main__":
    run_command(main)
