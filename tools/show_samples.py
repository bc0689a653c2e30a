"""Show what a run's model said: `dapo-mega show-samples` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.show_samples import main

if __name__ == "__main__":
    run_command(main)
