"""Sample a model's own responses to a prepared dataset, and keep some of the correct ones as a dataset to fine-tune on.

dapo-mega rejection-sample data/prepared --output data/mine --model runs/mine/hf --samples 16 --keep shortest
dapo-mega rejection-sample data/prepared --output data/mine --config my_run.yaml --urls http://127.0.0.1:30000

Killed, the same command continues; with another --keep and --force it chooses again, and asks nothing.
"""

import argparse
from collections.abc import Sequence
from typing import get_args

from dapo_mega.cli import leave_at_sigterm, quiet_libraries
from dapo_mega.commands._arguments import at_least_one
from dapo_mega.commands._prepare_dataset import named
from dapo_mega.commands._prepare_difficulty import add_asking, asking_config


def main(argv: Sequence[str] | None = None) -> None:
    """Sample and keep as the arguments say. Raises InputError and FleetError in one line."""
    from dapo_mega.config.preparation import DecontaminationConfig
    from dapo_mega.preparation.asking import parse_range
    from dapo_mega.preparation.rejection import KeepOptions, Rule, rejection_sample, responses_folder

    parser = argparse.ArgumentParser(description="Keep a model's own correct responses, to fine-tune on.")
    add_asking(parser)
    add = parser.add_argument
    add("--samples", type=at_least_one, default=8, metavar="K", help="responses per prompt (%(default)s)")
    add("--keep", choices=get_args(Rule), default="all", help="which of the correct responses (%(default)s)")
    add("--per-prompt", type=at_least_one, default=1, metavar="N", help="of best, shortest, diverse (%(default)s)")
    add("--min-distance", type=float, default=0.0, metavar="D", help="n-gram distance to those kept, 0 to 1 (0)")
    add("--pass-rates", default="0..1", metavar="A..B", help="only prompts with such a share of correct ones")
    add("--decontaminate", nargs="+", default=[], metavar="FILE", help="evaluation sets that no row may hold")
    options = parser.parse_args(argv)
    quiet_libraries()
    config = asking_config(options)
    leave_at_sigterm("stopped by SIGTERM; the same command continues, and asks nothing twice")
    keep = KeepOptions(
        samples=options.samples,
        rule=options.keep,
        per_prompt=options.per_prompt,
        min_distance=options.min_distance,
        pass_rates=parse_range(options.pass_rates),
        decontamination=DecontaminationConfig.model_validate({"sets": named(options.decontaminate)}),
        drop_failed=options.drop_failed,
        dropped=options.dropped,
        force=options.force,
    )
    card = rejection_sample(config, options.source, options.output, keep)
    dropped = ", ".join(f"{count} {reason}" for reason, count in card.dropped.items()) or "none"
    without = card.details["prompts_by_kept_responses"].get("0", 0)
    print(
        f"{options.output}: {card.num_rows} of {card.num_rows_read} responses are kept (dropped: {dropped}); {without} "
        f"prompts are left with none; all responses: {responses_folder(options.output)}"
    )
