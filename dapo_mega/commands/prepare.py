"""Prepare a run's inputs: data, tokenizers and a model with random weights.

dapo-mega prepare arithmetic --output data/arithmetic --num-train 2000 --num-eval 200
dapo-mega prepare init-model --output models/tiny --tokenizer character --hidden-size 128
dapo-mega prepare general-points --output data/points --num-train 1000 --num-eval 234
dapo-mega prepare reasoning-gym chain_sum spell_backward --output data/reasoning
dapo-mega prepare inspect data/arithmetic/train.parquet
dapo-mega prepare dataset data/mine.jsonl --output data/prepared

Outputs are folders that appear complete or not at all, each with a record (`preparation.json`) of the parameters it
was made from: asked for the same again, the command leaves it alone; asked for another, it needs --force.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo_mega.cli import quiet_libraries
from dapo_mega.commands._prepare_dataset import add_dataset, with_late_inputs
from dapo_mega.commands._prepare_difficulty import add_difficulty
from dapo_mega.commands._prepare_points import add_points
from dapo_mega.commands._prepare_reasoning_gym import add_reasoning_gym
from dapo_mega.commands._prepare_transform import add_transform
from dapo_mega.config import DatasetConfig
from dapo_mega.config.base import flat
from dapo_mega.data.arithmetic import (
    ALPHABET,
    DEFAULT_SHARES,
    OPERATORS,
    QUALITIES,
    ArithmeticTask,
    demonstration_table,
    problem_table,
)
from dapo_mega.data.readers import read_rows
from dapo_mega.data.templates import TEMPLATES, render_messages, templated_messages
from dapo_mega.data.tokenizer import build_byte_tokenizer, build_character_tokenizer, load_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.preparation.folders import prepare_folder

_PROMPT_COLUMN = "prompt"


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Raises InputError or OSError, with nothing half-written, if it cannot be carried out."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if options.command == "dataset":
        rest = with_late_inputs(options, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    quiet_libraries()
    options.run(options)


def prepare_arithmetic(options: argparse.Namespace) -> None:
    """Write train.parquet, eval.parquet (columns of DAPO-Math-17k), demonstrations.parquet and tokenizer/."""
    import pyarrow.parquet as pq

    task = ArithmeticTask(
        min_digits=options.min_digits,
        max_digits=options.max_digits,
        operators=tuple(dict.fromkeys(options.operators)),
        seed=options.seed,
    )
    shares = {quality: vars(options)[quality] for quality in QUALITIES}
    training, held_out = task.problems(options.num_train, options.num_eval)
    demonstrations = task.demonstrations(options.num_demonstrations, held_out, shares)

    def write(folder: Path) -> None:
        pq.write_table(problem_table(training), folder / "train.parquet")
        pq.write_table(problem_table(held_out), folder / "eval.parquet")
        pq.write_table(demonstration_table(demonstrations), folder / "demonstrations.parquet")
        build_character_tokenizer(ALPHABET).save_pretrained(folder / "tokenizer")

    # The texts belong to the parameters: a folder written by another version of them is not the same.
    parameters = {**_parameters(options), "example": demonstrations[0].response if demonstrations else ""}
    written = prepare_folder(options.output, parameters, write, options.force)
    counts = Counter(demonstration.quality for demonstration in demonstrations)
    mixture = ", ".join(f"{counts[quality]} {quality}" for quality in QUALITIES)
    print(
        f"{options.output}: {'' if written else 'already there, '}{len(training)} training and {len(held_out)} "
        f"held-out problems, {len(demonstrations)} demonstrations ({mixture})"
    )


def init_model(options: argparse.Namespace) -> None:
    """Write a Qwen2 checkpoint with random float32 weights, its tokenizer and its generation settings."""
    _check_sizes(options)
    tokenizer: Any
    if options.tokenizer in ("character", "byte"):
        tokenizer = build_byte_tokenizer() if options.tokenizer == "byte" else build_character_tokenizer(ALPHABET)
    else:
        tokenizer = load_tokenizer(options.tokenizer)

    def write(folder: Path) -> None:
        import torch
        from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

        from dapo_mega.models.hf_writer import set_usual_permissions

        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            max_position_embeddings=options.max_positions,
            tie_word_embeddings=not options.untied,
            **special,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            model = Qwen2ForCausalLM(config).float()
        model.generation_config = GenerationConfig(**special)
        model.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):
            set_usual_permissions(file)
        tokenizer.save_pretrained(folder)

    written = prepare_folder(options.output, _parameters(options), write, options.force)
    print(
        f"{options.output}: {'' if written else 'already there, '}Qwen2 with random weights, {options.layers} layers, "
        f"hidden size {options.hidden_size}, {len(tokenizer)} tokens"
    )


def inspect(options: argparse.Namespace) -> None:
    """Print the columns with the first row's values, the number of rows, and the first prompt rendered."""
    rows = read_rows(DatasetConfig(path=options.file, split=options.split))
    first = next(rows, None)
    if first is None:
        raise InputError(f"dataset {options.file} has no rows")
    fields = flat(first.values)  # By their dotted names, as columns are named in a configuration.
    print("columns, with the first row's values:")
    for name, value in fields.items():
        print(f"  {name}: {value!r:.80}")
    print(f"rows: {1 + sum(1 for _ in rows)}")
    column = options.prompt_column or _PROMPT_COLUMN
    if not options.prompt_column and column not in fields:
        print(
            f"no column {column!r}: to see a prompt as it is asked, add --prompt-column with one of the columns above"
        )
        return
    value = first.value(column, "--prompt-column")
    try:
        prompt = render_messages(templated_messages(value, options.template)[1])
    except InputError as error:
        raise InputError(f"{first.where}: {error}") from error
    print(f"first prompt ({column}, template {options.template}):\n{prompt}")


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("run", "output", "force")}


def _check_sizes(options: argparse.Namespace) -> None:
    for name in ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "max_positions"):
        if vars(options)[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} {vars(options)[name]}: give 1 or more")
    unit = 2 * options.heads
    if options.hidden_size % unit:
        raise InputError(
            f"--hidden-size {options.hidden_size} is not a multiple of {unit} = 2 x --heads, which rotary positions "
            f"need; the nearest is {max(1, round(options.hidden_size / unit)) * unit}"
        )
    if options.heads % options.kv_heads:
        divisors = [n for n in range(1, options.heads + 1) if options.heads % n == 0]
        raise InputError(f"--kv-heads {options.kv_heads} does not divide --heads {options.heads}; choose of {divisors}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Prepare a run's inputs: data, tokenizer, model.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_arithmetic(commands.add_parser("arithmetic", help="problems, held-out problems, demonstrations, tokenizer"))
    points = commands.add_parser("general-points", help="deals of GeneralPoints, in and out of distribution")
    _add_output(points)
    add_points(points)
    gym = commands.add_parser("reasoning-gym", help="problems of reasoning-gym's generators, train and held out")
    _add_output(gym)
    add_reasoning_gym(gym)
    add_dataset(
        commands.add_parser("dataset", help="training data without duplicates, contamination and unusable rows")
    )
    _add_init_model(commands.add_parser("init-model", help="a small Qwen2 checkpoint with random weights"))
    add_transform(commands.add_parser("transform", help="rewrite problems so that their answers are integers"))
    add_difficulty(commands.add_parser("difficulty", help="how often a model solves each prompt"))
    command = commands.add_parser("inspect", help="columns, rows and first prompt of a data set")
    add = command.add_argument
    add("file", help="file or folder of files")
    add("--split", default="train", help="which files of a folder (default: %(default)s)")
    add("--prompt-column", help=f"dotted name of the prompts' column (default: {_PROMPT_COLUMN})")
    add("--template", default="as_is", help=f"{', '.join(TEMPLATES)}, or text with {{problem}} (default: %(default)s)")
    command.set_defaults(run=inspect)
    return parser


def _add_arithmetic(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_output(command)
    task = ArithmeticTask()
    add("--num-train", type=int, default=4000)
    add("--num-eval", type=int, default=200)
    add("--num-demonstrations", type=int, default=4000)
    add("--min-digits", type=int, default=task.min_digits)
    add("--max-digits", type=int, default=task.max_digits)
    add("--operators", nargs="+", choices=OPERATORS, default=list(task.operators))
    for quality in QUALITIES:
        add(f"--{quality}", type=float, default=DEFAULT_SHARES[quality], help=f"share of {quality} demonstrations")
    command.set_defaults(run=prepare_arithmetic)


def _add_init_model(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_output(command)
    add("--tokenizer", default="character", help="character (of arithmetic), byte, or a folder (default: %(default)s)")
    add("--hidden-size", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--intermediate-size", type=int, default=384)
    add("--max-positions", type=int, default=512)
    add("--untied", action="store_true", help="an output layer separate from the embedding")
    command.set_defaults(run=init_model)


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", type=Path, required=True, help="folder to write")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--force", action="store_true", help="replace an earlier call's output with other parameters")
