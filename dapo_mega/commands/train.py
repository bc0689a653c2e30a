"""Train with DAPO: `dapo-mega train --processes N --config configs/quickstart.yaml [key=value ...]`.

The same code as `launch/train_dapo.py`, which torchrun takes. Also runs as a single process. Resumes if the run's
folder has a checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dapo_mega.cli import leave_at_sigterm, quiet_libraries


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a policy with DAPO on Megatron-Core.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--dry-run", action="store_true", help="validate, print configuration and layout, and exit")
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume although the configuration differs from the saved one"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="section.key=value overrides of the file"
    )
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    leave_at_sigterm("the run was stopped by SIGTERM before it began; start the same command again")
    quiet_libraries()
    from dapo_mega.config import RunConfig, load_config

    config = load_config(RunConfig, arguments.config, arguments.overrides)
    if arguments.dry_run:
        from dapo_mega.planning.dry_run import print_dry_run

        print_dry_run(config)
        return
    from dapo_mega.megatron.repairs import cpu_accelerator

    cpu_accelerator.install()
    from dapo_mega.training.run import run_training

    run_training(config, accept_changes=arguments.accept_changes)
