"""Replay a recorded step: `dapo-mega replay-step` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.replay_step import main

if __name__ == "__main__":
    run_command(main)
