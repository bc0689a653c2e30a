"""Start the SGLang engines of one machine: `dapo-mega serve` as a script."""

from dapo_mega.cli import run_command
from dapo_mega.commands.serve import main

if __name__ == "__main__":
    run_command(main)
