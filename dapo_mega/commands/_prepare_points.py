"""`dapo-mega prepare general-points`: deals to train on and to evaluate by, and solutions to imitate."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo_mega.data.general_points import (
    ALPHABET,
    STYLES,
    PointsProblem,
    PointsTask,
    answer_text,
    prompt_text,
    values_of,
)
from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.environments.general_points import message_text, verify
from dapo_mega.preparation.folders import prepare_folder

_HELP = {
    "num_train": "deals to train on, and solutions to imitate (default: %(default)s)",
    "num_eval": "held-out deals at most, under each rule (default: the paper's %(default)s)",
    "cards": "cards of a deal, 2 to 4 (default: %(default)s)",
    "target": "what formulas must equal (default: %(default)s)",
}


def add_points(command: argparse.ArgumentParser) -> None:
    for name, default in (("num_train", 1000), ("num_eval", 234), ("cards", 4), ("target", 24)):
        command.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=_HELP[name])
    command.add_argument("--prompt-style", choices=STYLES, default="paper", help="short: for a character tokenizer")
    command.set_defaults(run=prepare_points)


def prepare_points(options: argparse.Namespace) -> None:
    """Write train.parquet, eval-in_distribution.parquet, eval-out_of_distribution.parquet (these two are the split
    `eval` of the folder), demonstrations.parquet, warm_start.parquet and, in the short style, tokenizer/."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    splits = PointsTask(options.cards, options.target, options.seed).splits(options.num_train, options.num_eval)
    tables = {
        "train": _questions(splits.train, "train", options),
        "eval-in_distribution": _questions(splits.in_distribution, "in_distribution", options),
        "eval-out_of_distribution": _questions(splits.out_of_distribution, "out_of_distribution", options),
        "demonstrations": _demonstrations(splits.train, options),
        "warm_start": _demonstrations(splits.both_rules, options) + _later_tries(splits.both_rules, options),
    }

    def write(folder: Path) -> None:
        for name, rows in tables.items():
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        if options.prompt_style == "short":
            build_character_tokenizer(ALPHABET).save_pretrained(folder / "tokenizer")

    # The texts belong to the parameters: a folder written by another version of them is not the same.
    parameters = {key: value for key, value in vars(options).items() if key not in ("run", "output", "force")}
    parameters["example"] = tables["warm_start"][-1] if splits.train else {}
    written = prepare_folder(options.output, parameters, write, options.force)
    print(
        f"{options.output}: {'' if written else 'already there, '}{len(splits.train)} deals to train on, "
        f"{len(splits.in_distribution)} held out, {len(splits.out_of_distribution)} held out under the other rule"
    )


def _prompt(problem: PointsProblem, options: argparse.Namespace) -> str:
    return prompt_text(problem.deal, problem.face_cards, options.target, options.prompt_style)


def _questions(problems: Sequence[PointsProblem], source: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows as the environment reads them; `reward_model` is where the trainer looks for an answer."""
    return [
        {
            "data_source": source,
            "prompt": _prompt(problem, options),
            "reward_model": {"ground_truth": str(options.target)},
            "cards": list(problem.deal),
            "face_cards": problem.face_cards,
            "target": options.target,
        }
        for problem in problems
    ]


def _demonstrations(problems: Sequence[PointsProblem], options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {"prompt": _prompt(problem, options), "response": answer_text(problem, options.target, options.prompt_style)}
        for problem in problems
    ]


def _later_tries(problems: Sequence[PointsProblem], options: argparse.Namespace) -> list[dict[str, Any]]:
    """In the short style a solution after one or two wrong answers, as a model without any language does not know that
    it may try again. A conversation is not written: its turns are a chat template's matter."""
    if options.prompt_style != "short":
        return []
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([options.seed, 1])))
    rows = _demonstrations(problems, options)
    for row, problem in zip(rows, problems, strict=True):
        values = values_of(problem.deal, problem.face_cards)
        for _ in range(int(rng.integers(1, 3))):
            tried = _guess(values, rng)
            kind, why = verify(tried, values, options.target)
            if kind != "right":
                row["prompt"] += tried + message_text(kind, why, "short")
    return rows


def _guess(values: tuple[int, ...], rng: np.random.Generator) -> str:
    """The numbers in a random order with random operators; sometimes one is missing or another one."""
    numbers = rng.permutation(values).tolist()
    fault = int(rng.integers(4))
    if fault == 0:
        numbers = numbers[1:]
    if fault == 1:
        numbers[0] = int(rng.integers(1, 14))
    return "".join(f"{'+-*/'[int(rng.integers(4))] if place else ''}{number}" for place, number in enumerate(numbers))
