"""Takes the first problems of a task for rejection sampling, and draws the table of accuracy after each stage."""

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq

STAGES = {
    "base": "base model",
    "stage1": "1, cold start: SFT on careful answers",
    "stage2": "2, RL: accuracy and language",
    "stage3": "3, rejection sampling, SFT of the base model",
    "stage4": "4, RL for all",
    "small_base": "a quarter of the size: base model",
    "small_distilled": "SFT on what stage 2 said",
    "small_rl": "RL in its place",
}


def show(folder: Path) -> None:
    """The table, from each stage's evaluation: avg@k with its standard error in percent, mean length in tokens."""
    print("| stage | accuracy on held-out problems | tokens of an answer |\n|---|---|---|")
    for name, title in STAGES.items():
        found = json.loads((folder / f"{name}.json").read_text())
        print(f"| {title} | {found['evaluation/avg_at_k']:.3f} | {found['evaluation/response_length_mean']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts")
    prompts.add_argument("task", type=Path)
    prompts.add_argument("number", type=int)
    prompts.add_argument("output", type=Path)
    commands.add_parser("show").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "prompts":
        pq.write_table(pq.read_table(given.task).slice(0, given.number), given.output)
    else:
        show(given.folder)


if __name__ == "__main__":
    main()
