"""Draw the training curves of a run, alone or against other runs, as one PNG.

dapo-mega plot runs/dapo-7b
dapo-mega plot runs/dapo-7b --compare runs/grpo-7b --output dapo-and-grpo.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dapo_mega.errors import InputError
from dapo_mega.metrics.plotting import plot_run
from dapo_mega.metrics.summary import before_and_after


def main(argv: Sequence[str] | None = None) -> None:
    """Plot as the arguments say. Raises InputError if a run has no metrics that can be drawn."""
    parser = argparse.ArgumentParser(description="Draw the training curves of a run as one PNG.")
    parser.add_argument("run_dir", type=Path, help="folder of the run, which holds metrics.jsonl")
    parser.add_argument("--output", type=Path, help="PNG file to write (default: RUN_DIR/curves.png)")
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="OTHER_RUN_DIR", help="runs to draw over it"
    )
    arguments = parser.parse_args(argv)
    output = arguments.output or arguments.run_dir / "curves.png"
    try:
        plot_run([arguments.run_dir, *arguments.compare], output)
    except ValueError as error:
        raise InputError(str(error)) from error
    print("\n".join(before_and_after(arguments.run_dir)))
    print(f"curves: {output}")
