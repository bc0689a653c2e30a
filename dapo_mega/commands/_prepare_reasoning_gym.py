"""`dapo-mega prepare reasoning-gym`: problems of one or more of its generators, to train on and held out."""

import argparse
import ast
import dataclasses
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from dapo_mega.errors import InputError
from dapo_mega.preparation.folders import prepare_folder

_TRIES: Final = 20
"""Problems that are made for one that was not there before, at most."""
_NUM_CHECKED: Final = 8


def add_reasoning_gym(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("generators", nargs="+", help='names, with options: "chain_sum={max_terms: 4}"')
    add("--num-train", type=int, default=4000, help="of all generators in turns (default: %(default)s)")
    add("--num-eval", type=int, default=200, help="held out, in turns (default: %(default)s)")
    add("--allow-code", action="store_true", help="also generators whose scorers run answers as Python")
    command.set_defaults(run=prepare_reasoning_gym)


def prepare_reasoning_gym(options: argparse.Namespace) -> None:
    """Write train.parquet and eval.parquet. No question is there twice."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generators = dict(map(_named, options.generators))
    if len(generators) < len(options.generators):
        raise InputError(f"a generator is there twice in {', '.join(options.generators)}; give each once")
    if negative := [key for key in ("num_train", "num_eval", "seed") if getattr(options, key) < 0]:
        raise InputError(f"{negative[0]}={getattr(options, negative[0])} is negative; give 0 or more")
    columns = [_rows(name, generators[name], place, options) for place, name in enumerate(generators)]
    held_out = _in_turns(columns, options.num_eval)
    splits = {"train": _in_turns(columns, options.num_train), "eval": held_out}

    def write(folder: Path) -> None:
        for name, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")

    parameters = {key: value for key, value in vars(options).items() if key not in ("run", "output", "force")}
    parameters["reasoning_gym"] = version("reasoning-gym")
    written = prepare_folder(options.output, parameters, write, options.force)
    print(
        f"{options.output}: {'' if written else 'already there, '}{options.num_train} problems to train on and "
        f"{options.num_eval} held out, of {', '.join(generators)}"
    )


def _named(text: str) -> tuple[str, dict[str, Any]]:
    name, _, given = text.partition("=")
    try:
        options = yaml.safe_load(given) if given else {}
    except yaml.YAMLError:
        options = None
    if not isinstance(options, dict) or {"seed", "size"} & options.keys():
        raise InputError(
            f"generator {text!r}: give NAME, or NAME={{option: value, ...}}; seed and size are --seed, --num-train"
        )
    return name, options


def _in_turns(columns: list[Iterator[dict[str, Any]]], num: int) -> list[dict[str, Any]]:
    """The next so many rows, one of each generator after the other."""
    return [next(columns[place % len(columns)]) for place in range(num)]


def _rows(name: str, given: Mapping[str, Any], place: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows with questions that differ. Raises InputError for a generator that cannot be used, or has no more."""
    from dapo_mega.rewards.reasoning_gym import COLUMN, check_code

    num = options.num_train + options.num_eval
    dataset = _dataset(name, given, num, np.random.SeedSequence([options.seed, place]))
    check_code(name, options.allow_code)
    seen: set[str] = set()
    for index in range(_TRIES * num):
        problem = dataset[index]
        entry = {"generator": name, "options": given, "answer": problem["answer"]}
        entry["metadata"] = {key: value for key, value in problem["metadata"].items() if _is_literal(value)}
        row = {
            "data_source": name,
            "prompt": problem["question"],
            "reward_model": {"ground_truth": problem["answer"]},
            COLUMN: repr(entry),
        }
        if index < _NUM_CHECKED:
            _check(row, options.allow_code)
        if problem["question"] not in seen:
            seen.add(problem["question"])
            yield row
    raise InputError(
        f"generator {name} has {len(seen)} different questions in {_TRIES * num}; ask for fewer, or give it options "
        f"that allow for more"
    )


def _dataset(name: str, given: Mapping[str, Any], num: int, seed: np.random.SeedSequence) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS or name == "composite":
        raise InputError(
            f"reasoning-gym has no generator {name!r}; it has {', '.join(sorted({*DATASETS} - {'composite'}))}"
        )
    try:
        # A problem's own seed is this one plus its number, so seeds that are near one another would share problems.
        return create_dataset(name, **given, size=max(1, _TRIES * num), seed=int(seed.generate_state(1)[0] >> 1))
    except (TypeError, ValueError, AssertionError, ArithmeticError, LookupError, AttributeError) as error:
        known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
        raise InputError(
            f"generator {name} refuses {dict(given)}: {error}; its options are {', '.join(known)}"
        ) from error


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _check(row: Mapping[str, Any], allow_code: bool) -> None:
    """Raises InputError where the reward would not tell a right answer from a wrong one."""
    from dapo_mega.rewards.reasoning_gym import score

    name, answer = row["data_source"], row["reward_model"]["ground_truth"]
    if not isinstance(answer, str):
        raise InputError(f"generator {name} stores no answer, so that its scorer cannot be tried; leave it out")
    tried = {"fields": row, "opened_thought": ""}
    for text, expected in ((answer, True), ("definitely wrong", False)):
        result = score([{**tried, "response": f"<answer>{text}</answer>"}], allow_code)[0]
        if result["correct"] != expected:
            raise InputError(
                f"generator {name}: its scorer gives {result['score']} to {text!r:.80} where the answer is "
                f"{answer!r:.80}, so it cannot be trained on; leave it out"
            )
