"""Supervised fine-tuning: `dapo-mega sft --processes N --config configs/quickstart_sft.yaml [key=value ...]`.

The same code as `launch/train_sft.py`, which torchrun takes. Resumes if the run's folder has a checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dapo_mega.cli import leave_at_sigterm, quiet_libraries


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a model on demonstrations with Megatron-Core.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--dry-run", action="store_true", help="validate, print configuration and layout, and exit")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="section.key=value overrides of the file"
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume although the configuration differs from the saved one"
    )
    arguments = parser.parse_intermixed_args()
    leave_at_sigterm("the run was stopped by SIGTERM before it began; start the same command again")
    quiet_libraries()
    from dapo_mega.config import SftConfig, load_config

    config = load_config(SftConfig, arguments.config, arguments.overrides)
    if arguments.dry_run:
        from dapo_mega.planning.dry_run import print_dry_run

        print_dry_run(config)
        return
    from dapo_mega.megatron.repairs import cpu_accelerator

    cpu_accelerator.install()
    from dapo_mega.training.sft import run_sft

    run_sft(config, accept_changes=arguments.accept_changes)
