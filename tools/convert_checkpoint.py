"""Convert, reshard, compare and inspect checkpoints: `dapo-mega convert` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.convert import main

if __name__ == "__main__":
    run_command(main)
