"""Prepare a training dataset: duplicates, contamination and unusable rows are left out, counted and named.

dapo-mega prepare dataset data/mine.jsonl --output data/prepared --prompt-column problem --answer-column answer
dapo-mega prepare dataset --config prepare.yaml --output data/prepared --dropped parquet filters.proofs=true
"""

import argparse
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_mega.commands._arguments import add_prepared_output
from dapo_mega.errors import InputError, StopRequested

if TYPE_CHECKING:
    from dapo_mega.config import PreparationConfig
    from dapo_mega.preparation.card import Card

_OVERRIDE = re.compile(r"\w+(\.[\w-]+)*=")


def add_dataset(command: argparse.ArgumentParser) -> None:
    """The arguments of the command; `with_late_inputs` takes those that stand behind options."""
    add = command.add_argument
    command.description = __doc__
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    add("inputs", nargs="*", metavar="FILE | section.key=value", help="sources, and overrides of the recipe's keys")
    add("--config", type=Path, help="recipe as a YAML file, in place of FILE")
    add_prepared_output(command)
    add("--prompt-column", help="dotted name of the problems' column (default: prompt)")
    add("--answer-column", help="dotted name of the answers' column (default: reward_model.ground_truth)")
    add("--answer-style", help="verbatim, gsm8k, boxed or unchecked (default: verbatim)")
    add("--decontaminate", nargs="+", default=[], metavar="FILE", help="evaluation sets that must not be trained on")
    command.set_defaults(run=prepare_dataset)


def with_late_inputs(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Take files and overrides that stand behind options out of `rest`, what argparse did not recognise; returns what
    is left."""
    overrides = [text for text in options.decontaminate if _OVERRIDE.match(text)]
    options.decontaminate = [text for text in options.decontaminate if text not in overrides]
    options.inputs += overrides + [text for text in rest if not text.startswith("-")]
    return [text for text in rest if text.startswith("-")]


def prepare_dataset(options: argparse.Namespace) -> None:
    """Prepare a dataset and print where its rows went."""
    config = _recipe(options)
    signal.signal(signal.SIGTERM, _stop)
    from dapo_mega.preparation.dataset import prepare_dataset as prepare

    card, is_new = prepare(config, options.output, options.dropped, force=options.force)
    print(_summary(options.output, card, is_new=is_new))


def _recipe(options: argparse.Namespace) -> "PreparationConfig":
    from dapo_mega.config import PreparationConfig
    from dapo_mega.config.files import configured, read_yaml

    overrides = [text for text in options.inputs if _OVERRIDE.match(text)]
    files = [text for text in options.inputs if text not in overrides]
    if bool(files) == bool(options.config):
        raise InputError("give the sources as FILE or in a recipe with --config, and not both")
    raw = read_yaml(options.config) if options.config else {"sources": named(files)}
    columns = {"prompt": options.prompt_column, "ground_truth": options.answer_column}
    given = {key: value for key, value in columns.items() if value}
    if options.config and (given or options.answer_style):
        raise InputError("--prompt-column, --answer-column and --answer-style are for FILE; the recipe has such keys")
    if files:
        for source in raw["sources"].values():
            source.update({"columns": given} if given else {})
            source.update({"ground_truth_style": options.answer_style} if options.answer_style else {})
    config = configured(PreparationConfig, raw, overrides, options.config.parent if options.config else Path())
    if options.decontaminate:
        sets = config.decontamination.model_dump()
        sets["sets"] = {**sets["sets"], **named(options.decontaminate)}
        config = configured(PreparationConfig, {**config.model_dump(), "decontamination": sets}, [])
    return config


def named(paths: list[str]) -> dict[str, Any]:
    """Sections with these paths, under the names of the files."""
    named: dict[str, Any] = {}
    for path in paths:
        stem = re.sub(r"[^\w.-]", "-", Path(path).stem) or "source"
        name = stem if stem not in named else f"{stem}-{len(named)}"
        named[name] = {"path": path}
    return named


def _summary(output: Path, card: "Card", *, is_new: bool) -> str:
    counts = [(reason, number) for reason, number in card.dropped.items() if number]
    width = len(str(card.num_rows_read))
    lines = [f"{output}:{'' if is_new else ' already there,'} {card.num_rows} of {card.num_rows_read} rows"]
    for reason, number in sorted(counts, key=lambda count: -count[1]):
        examples = card.details.get("examples", {}).get(reason, [])
        lines.append(f"  {number:>{width}} {reason}" + (f", such as {examples[0]:.200}" if examples else ""))
    if others := card.details.get("duplicates_with_another_answer"):
        lines.append(f"  {others} of the duplicates have another answer than the row that stays")
    for place, reason in card.details.get("broken_files", {}).items():
        lines.append(f"  broken: {place}: {reason}")
    for column in card.details.get("columns_of_mixed_types", []):
        lines.append(f"  column {column} holds values of several types and became text")
    return "\n".join(lines)


def _stop(*_: object) -> None:
    raise StopRequested("the preparation was stopped by SIGTERM and left nothing behind; start the same command again")
