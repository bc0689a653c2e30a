"""Compare saved evaluations: does training widen what the base model can do, or only sharpen it?

dapo-mega compare runs/mine@0 runs/mine@200
dapo-mega compare evaluations/base evaluations/dapo evaluations/grpo --k 1 16 256 --output comparison
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dapo_mega.atomic_files import replace_file
from dapo_mega.cli import print_once
from dapo_mega.commands._arguments import at_least_one
from dapo_mega.errors import InputError
from dapo_mega.evaluation.comparison import compare
from dapo_mega.evaluation.comparison_picture import draw_comparisons
from dapo_mega.evaluation.comparison_text import as_text, as_values
from dapo_mega.evaluation.saved import load_evaluations
from dapo_mega.evaluation.settings import GROUPS


def main(argv: Sequence[str] | None = None) -> None:
    """Compare as the arguments say. Raises InputError for evaluations that cannot be compared."""
    parser = argparse.ArgumentParser(
        description="Compare saved evaluations of a base model and of models made of it, problem by problem."
    )
    parser.add_argument(
        "evaluations",
        nargs="+",
        metavar="EVALUATION",
        help="the base, then the others: folder of a run (RUN@STEP: one of its evaluations) or of results of "
        "dapo-mega evaluate, or one parquet file of them",
    )
    parser.add_argument("--k", type=at_least_one, nargs="+", default=[], help="the k of pass@k (default: powers of 2)")
    parser.add_argument("--only", nargs="+", default=[], metavar="BENCHMARK", help="compare these benchmarks only")
    parser.add_argument(
        "--allow-different",
        nargs="+",
        default=[],
        choices=list(GROUPS),
        help="compare although these settings of the evaluations differ",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("comparison"),
        metavar="FOLDER",
        help="folder for comparison.json and comparison.png (default: %(default)s)",
    )
    arguments = parser.parse_intermixed_args(argv)
    comparisons = compare(
        load_evaluations(arguments.evaluations), ks=arguments.k, only=arguments.only, allowed=arguments.allow_different
    )
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {arguments.output} cannot be made a folder ({error.strerror})") from error
    values = [as_values(comparison) for comparison in comparisons]
    draw_comparisons(comparisons, arguments.output / "comparison.png")
    replace_file(arguments.output / "comparison.json", json.dumps({"benchmarks": values}, indent=2) + "\n")
    print_once("\n\n".join(map(as_text, comparisons)))
    print_once(f"\npicture: {arguments.output / 'comparison.png'}, data: {arguments.output / 'comparison.json'}")
