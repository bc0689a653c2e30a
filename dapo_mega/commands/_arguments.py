"""Arguments that several commands share, and the way from a run's file to its start or dry run."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dapo_mega.cli import leave_at_sigterm, loading, quiet_libraries

if TYPE_CHECKING:
    from dapo_mega.config import RunConfig, SftConfig

ConfigT = TypeVar("ConfigT", "RunConfig", "SftConfig")


def at_least_one(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """The keys of a JSON object, for argparse."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def add_prepared_output(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Add where a prepared dataset is written to."""
    add = parser.add_argument
    add("--output", type=Path, required=is_required, help="folder of the new dataset")
    add("--force", action="store_true", help="replace a prepared dataset in this folder")
    add("--dropped", choices=("parquet", "jsonl"), help="also write the rows that are left out, with their reasons")


def parse_training_arguments(description: str) -> argparse.Namespace:
    """The run's file, the overrides of its keys, and what is to be done with them."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="YAML file of the run")
    add("overrides", nargs="*", metavar="section.key=value", help="section.key=value overrides of the file")
    add("--dry-run", action="store_true", help="check the run, print its layout, and exit")
    add("--elsewhere", action="store_true", help="with --dry-run: the run is for another machine")
    add("--all", action="store_true", help="with --dry-run: print every key with its value, too")
    add("--accept-changes", action="store_true", help="resume although the configuration differs from the saved one")
    arguments = parser.parse_intermixed_args()
    leave_at_sigterm("the run was stopped by SIGTERM before it began; start the same command again")
    quiet_libraries()
    return arguments


def load_to_train(kind: type[ConfigT], arguments: argparse.Namespace) -> ConfigT | None:
    """The run's configuration, ready for an import of Megatron-Core; None after a dry run, which is printed."""
    from dapo_mega.config import load_config

    config = load_config(kind, arguments.config, arguments.overrides)
    if arguments.dry_run:
        from dapo_mega.planning.dry_run import print_dry_run

        print_dry_run(config, elsewhere=arguments.elsewhere, everything=arguments.all)
        return None
    prepare_megatron()
    return config


def prepare_megatron() -> None:
    """Let Megatron-Core be imported, also without a GPU, and say nothing that helps nobody."""
    quiet_libraries()
    with loading():
        from dapo_mega.megatron.core.repairs import cpu_accelerator

        cpu_accelerator.install()
