"""Score saved responses again without asking any model: `dapo-mega regrade` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.regrade import main

if __name__ == "__main__":
    run_command(main)
