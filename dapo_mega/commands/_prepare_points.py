"""`dapo-mega prepare general-points`: deals to train on and to evaluate by, and solutions to imitate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_mega.data.general_points import ALPHABET, STYLES, PointsProblem, PointsTask, answer_text, prompt_text
from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.preparation.folders import prepare_folder

if TYPE_CHECKING:
    import pyarrow as pa

_FILES = {
    "train": "train.parquet",
    "in_distribution": "eval-in_distribution.parquet",
    "out_of_distribution": "eval-out_of_distribution.parquet",
}
"""Those of the evaluations are the split `eval` of the folder."""


def add_points(command: argparse.ArgumentParser) -> None:
    command.add_argument("--num-train", type=int, default=1000)
    command.add_argument("--num-eval", type=int, default=234, help="of each evaluation (default: the paper's 234)")
    command.add_argument("--cards", type=int, default=4)
    command.add_argument("--target", type=int, default=24)
    command.add_argument("--prompt-style", choices=STYLES, default="paper", help="short: for character tokenizers")
    command.set_defaults(run=prepare_points)


def prepare_points(options: argparse.Namespace) -> None:
    """Write train.parquet, two eval-*.parquet, demonstrations.parquet, demonstrations_both.parquet and tokenizer/."""
    import pyarrow.parquet as pq

    task = PointsTask(options.cards, options.target, options.seed)
    splits = task.splits(options.num_train, options.num_eval)
    demonstrations = {"demonstrations": splits.train, "demonstrations_both": splits.both_rules}

    def write(folder: Path) -> None:
        for name, file in _FILES.items():
            pq.write_table(_table(getattr(splits, name), name, options), folder / file)
        for name, problems in demonstrations.items():
            pq.write_table(_table(problems, name, options, answered=True), folder / f"{name}.parquet")
        if options.prompt_style == "short":
            build_character_tokenizer(ALPHABET).save_pretrained(folder / "tokenizer")

    parameters = {key: value for key, value in vars(options).items() if key not in ("run", "output", "force")}
    written = prepare_folder(
        options.output, {**parameters, "example": _example(splits.train, options)}, write, options.force
    )
    print(
        f"{options.output}: {'' if written else 'already there, '}{len(splits.train)} deals to train on, "
        f"{len(splits.in_distribution)} held out, {len(splits.out_of_distribution)} held out under the other rule"
    )


def _table(
    problems: Sequence[PointsProblem], source: str, options: argparse.Namespace, *, answered: bool = False
) -> pa.Table:
    """Columns as GeneralPoints reads them, and those of DAPO-Math-17k; with `answered` those of demonstrations."""
    import pyarrow as pa

    rows: list[dict[str, Any]] = [
        {"prompt": prompt_text(problem.deal, problem.face_cards, options.target, options.prompt_style)}
        | (
            {"response": answer_text(problem, options.target, options.prompt_style)}
            if answered
            else {
                "data_source": source,
                "reward_model": {"ground_truth": str(options.target)},
                "cards": list(problem.deal),
                "face_cards": problem.face_cards,
                "target": options.target,
            }
        )
        for problem in problems
    ]
    return pa.Table.from_pylist(rows)


def _example(problems: Sequence[PointsProblem], options: argparse.Namespace) -> str:
    """A text of the task: a folder that was written by another version of them is not the same."""
    if not problems:
        return ""
    return prompt_text(problems[0].deal, "ten", options.target, options.prompt_style) + answer_text(
        problems[0], options.target, options.prompt_style
    )
