"""Evaluate a Hugging Face checkpoint on held-out prompts: avg@k, pass@k, maj@k.

dapo-mega evaluate --config configs/quickstart.yaml model.path=MODEL data.evaluation.path=FILE

Reads the same configuration files as training; the sections used are model, data.evaluation, rollout, reward and
evaluation. One process, the embedded engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dapo_mega.cli import quiet_libraries
from dapo_mega.commands._arguments import add_run_file


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a Hugging Face checkpoint on held-out prompts.")
    add_run_file(parser)
    parser.add_argument("--output", type=Path, help="also write the metrics to this JSON file")
    parser.add_argument(
        "--samples", type=Path, metavar="FOLDER", help="also write all responses, for dapo-mega show-samples FOLDER"
    )
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    from dapo_mega.config import RunConfig, load_config
    from dapo_mega.evaluation.held_out import evaluate_checkpoint

    metrics = evaluate_checkpoint(load_config(RunConfig, arguments.config, arguments.overrides), arguments.samples)
    for name, value in metrics.items():
        print(f"{name.removeprefix('evaluation/'):24s} {value:.4f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(metrics, indent=2) + "\n")
