"""Draws the table of a sequence of stages, makes Kimi k1.5's pairs of responses for DPO, and takes first problems."""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def show(evaluations: list[Path]) -> None:
    """A line for each stage's evaluation: mean accuracy of its responses, and their mean length in tokens."""
    print("| stage | accuracy on held-out problems | tokens of an answer |\n|---|---|---|")
    for file in evaluations:
        found = json.loads(file.read_text())
        print(f"| {file.stem} | {found['evaluation/avg_at_k']:.3f} | {found['evaluation/response_length_mean']:.1f} |")


def write_pairs(responses: Path, output: Path) -> None:
    """Pairs of the shortest right response to a prompt and each one that is at least 1.5 times as long, right or wrong
    (arXiv 2501.12599, section 2.4), from the responses of rejection sampling."""
    by_prompt = defaultdict(list)
    columns = ["prompt", "response", "correct", "length"]
    for file in sorted((responses / "samples").glob("*.parquet")):
        for row in pq.read_table(file, columns=columns).to_pylist():
            by_prompt[row["prompt"]].append(row)
    pairs = []
    for prompt, rows in by_prompt.items():
        chosen = min((row for row in rows if row["correct"]), key=lambda row: row["length"], default=None)
        if chosen:
            longer = [row["response"] for row in rows if row["length"] >= 1.5 * chosen["length"]]
            pairs += [{"prompt": prompt, "response": chosen["response"], "rejected": text} for text in set(longer)]
    if not pairs:
        raise SystemExit(f"error: {responses} has no prompt with a short right response and a longer one")
    pq.write_table(pa.Table.from_pylist(sorted(pairs, key=str)), output)
    print(f"{output}: {len(pairs)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show").add_argument("evaluations", type=Path, nargs="+")
    pairs = commands.add_parser("pairs")
    pairs.add_argument("responses", type=Path)
    pairs.add_argument("output", type=Path)
    first = commands.add_parser("first")
    first.add_argument("task", type=Path)
    first.add_argument("number", type=int)
    first.add_argument("output", type=Path)
    given = parser.parse_args()
    if given.command == "show":
        show(given.evaluations)
    elif given.command == "first":
        pq.write_table(pq.read_table(given.task).slice(0, given.number), given.output)
    else:
        write_pairs(given.responses, given.output)


if __name__ == "__main__":
    main()
