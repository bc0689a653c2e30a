"""Draw the training curves of a run: `dapo-mega plot` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.plot import main

if __name__ == "__main__":
    run_command(main)
