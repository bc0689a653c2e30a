"""Train a policy with DAPO, alone or under torchrun: `dapo-mega train` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.train import main

if __name__ == "__main__":
    run_command(main)
