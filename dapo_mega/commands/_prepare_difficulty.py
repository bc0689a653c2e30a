"""`dapo-mega prepare difficulty`: measure how often a model solves each prompt of a prepared dataset."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_mega.cli import leave_at_sigterm
from dapo_mega.commands._arguments import add_prepared_output, at_least_one
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from dapo_mega.config import RunConfig

_KEYS = {
    "model": "model.path", "dtype": "model.dtype", "template": "data.train.template", "extraction": "reward.extraction",
    "max_response_tokens": "rollout.max_response_tokens", "temperature": "rollout.temperature", "seed": "seed",
    "urls": "rollout.fleet.urls",
}  # fmt: skip
"""The configuration keys that flags stand for."""


def add_difficulty(command: argparse.ArgumentParser) -> None:
    add_asking(command)
    add = command.add_argument
    add("--samples", type=at_least_one, default=8, metavar="K", help="responses per prompt (%(default)s)")
    add("--keep", default="0..1", metavar="A..B", help="pass rates to keep (%(default)s)")
    add("--column", default="difficulty", help="name of the pass rate's column (%(default)s)")
    command.set_defaults(run=difficulty)


def add_asking(command: argparse.ArgumentParser) -> None:
    """Add the prepared dataset, where the result goes, and how the model is asked."""
    add = command.add_argument
    add("source", type=Path, help="folder of a prepared dataset, with its card.json")
    add_prepared_output(command)
    add("--config", type=Path, help="YAML file of a run whose model, template and reward count")
    add("--model", help="folder of a Hugging Face checkpoint")
    add("--urls", help="URLs of SGLang engines that hold this model, with commas between")
    add("--template", help="instruction around the problem (dapo)")
    add("--extraction", help="where answers are looked for (dapo)")
    add("--max-response-tokens", help="longest response (1024)")
    add("--temperature", help="sampling temperature (1)")
    add("--dtype", choices=("fp32", "bf16"), help="number format of the model (bf16)")
    add("--seed", help="seed of all samples (0)")
    add("--set", nargs="+", default=[], metavar="section.key=value", help="any other key of a run, as for train")
    add("--drop-failed", action="store_true", help="leave out prompts whose responses failed")


def difficulty(options: argparse.Namespace) -> None:
    config = asking_config(options)
    from dapo_mega.preparation.asking import parse_range
    from dapo_mega.preparation.difficulty import DifficultyOptions, measure_difficulty

    measuring = DifficultyOptions(
        samples=options.samples,
        column=options.column,
        keep=parse_range(options.keep),
        drop_failed=options.drop_failed,
        dropped=options.dropped,
        force=options.force,
    )
    leave_at_sigterm("stopped by SIGTERM; the same command continues, and measures nothing twice")
    card = measure_difficulty(config, options.source, options.output, measuring)
    dropped = ", ".join(f"{count} {reason}" for reason, count in card.dropped.items()) or "none"
    mean = card.details["mean_pass_rate"]
    print(
        f"{options.output}: {card.num_rows} of {card.num_rows_read} prompts (dropped: {dropped}), mean pass rate "
        f"{mean:.3f} over {options.samples} samples"
    )


def asking_config(options: argparse.Namespace) -> "RunConfig":
    """The run's configuration: of a file or of defaults, then flags, then overrides."""
    from dapo_mega.config import RunConfig, load_config
    from dapo_mega.config.files import configured

    given = [f"{key}={value}" for flag, key in _KEYS.items() if (value := getattr(options, flag)) is not None]
    if options.urls is not None:
        given.append("rollout.placement=fleet")
    overrides = [*given, *options.set]
    if options.config is not None:
        return load_config(RunConfig, options.config, overrides)
    defaults: dict[str, Any] = {
        "output_dir": str(options.output),
        "num_steps": 1,
        "data": {"train": {"path": str(options.source)}},
        "rollout": {"max_response_tokens": 1024},
        "reward": {"overlong_punishment": False},
        # Nothing is trained here, so any length will do.
        "batch": {"tokens_per_microbatch": 2**31},
    }
    if not any(override.startswith("model.path=") for override in overrides):
        raise InputError("give --model FOLDER, or --config with a run's file")
    return configured(RunConfig, defaults, overrides)
