"""The quickstart's table: DAPO, random rewards and more supervised steps from the same cold starts.

python tools/quickstart_table.py --seeds 0 1 2 --output runs/quickstart

Runs what is not there yet (about eight minutes a seed on two cores) and prints a Markdown table. The supervised arm
gets as many updates as fit into the time that DAPO's rollouts and updates took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from dapo_mega.metrics import read_metrics

PROJECT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Reproduce the quickstart's table.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=PROJECT / "runs" / "quickstart")
    arguments = parser.parse_args()
    rows = [run_seed(seed, arguments.output.resolve() / f"seed{seed}") for seed in arguments.seeds]
    print("| seed | arm | held-out avg@8 | pass@8 | length | entropy |\n|---|---|---|---|---|---|")
    for arms in rows:
        for line in arms:
            print(line)


def run_seed(seed: int, folder: Path) -> list[str]:
    """Table rows of one seed; runs the arms that are missing."""
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    subprocess.run(
        ["bash", str(PROJECT / "launch" / "quickstart.sh"), "--seed", str(seed), "--output", str(folder)],
        check=True,
        env=environment,
        stdout=sys.stderr,
    )
    common = [
        f"seed={seed}",
        f"model.path={folder}/sft/hf",
        f"data.train.path={folder}/data/train.parquet",
        f"data.evaluation.path={folder}/data/eval.parquet",
    ]
    train("train_dapo.py", "quickstart.yaml", f"output_dir={folder}/random", "reward.source=random", *common)
    updates = matching_updates(folder)
    train(
        "train_sft.py",
        "quickstart_sft.yaml",
        f"seed={seed + 1000}",
        f"output_dir={folder}/more_sft",
        f"model.path={folder}/sft/hf",
        f"data.train.path={folder}/data/demonstrations.parquet",
        f"num_steps={updates}",
        "optimizer.learning_rate=1e-3",
    )
    more_sft = folder / "more_sft" / "evaluation.json"
    if not more_sft.is_file():
        run(
            [
                sys.executable,
                str(PROJECT / "tools" / "evaluate.py"),
                "--config",
                str(PROJECT / "configs" / "quickstart.yaml"),
                "--output",
                str(more_sft),
                *common,
                f"model.path={folder}/more_sft/hf",
            ]
        )
    return [
        row(seed, "cold start", first(folder / "dapo")),
        row(seed, "**DAPO**", last(folder / "dapo")),
        row(seed, "random rewards", last(folder / "random")),
        row(seed, f"{updates} more supervised updates", json.loads(more_sft.read_text())),
    ]


def train(script: str, config: str, *overrides: str) -> None:
    launcher = ["-W", "ignore", "-m", "dapo_mega.commands._processes", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "bound", "--rdzv-endpoint", "127.0.0.1:0"]
    run(
        [
            sys.executable,
            *launcher,
            str(PROJECT / "launch" / script),
            "--config",
            str(PROJECT / "configs" / config),
            *overrides,
        ]
    )


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, cwd=PROJECT, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})


def matching_updates(folder: Path) -> int:
    """Supervised updates that take as long as DAPO's steps did (evaluation and checkpoints aside)."""
    stages = ("rollout", "pack", "score", "update", "weight_sync")
    dapo = read_metrics(folder / "dapo" / "metrics.jsonl")
    seconds = sum(record.get(f"time/{stage}_s", 0.0) for record in dapo for stage in stages)
    supervised = [record["time/step_s"] for record in read_metrics(folder / "sft" / "metrics.jsonl")]
    return round(seconds / (sum(supervised) / len(supervised)))


def first(run_dir: Path) -> dict[str, float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    return {**records[1], **records[0]}


def last(run_dir: Path) -> dict[str, float]:
    return read_metrics(run_dir / "metrics.jsonl")[-1]


def row(seed: int, arm: str, metrics: dict[str, float]) -> str:
    entropy = f"{metrics['policy/entropy']:.3f}" if "policy/entropy" in metrics else "-"
    return (
        f"| {seed} | {arm} | {metrics['evaluation/avg_at_k']:.3f} | {metrics['evaluation/pass_at_k']:.3f} | "
        f"{metrics['evaluation/response_length_mean']:.1f} | {entropy} |"
    )


if __name__ == "__main__":
    main()
