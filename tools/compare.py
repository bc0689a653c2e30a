"""Compare saved evaluations of a base model and of models made of it: `dapo-mega compare` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.compare import main

if __name__ == "__main__":
    run_command(main)
