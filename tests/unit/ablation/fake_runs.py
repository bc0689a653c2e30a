"""Folders as trainers leave them, without a trainer."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from dapo_mega.ablation.plan import Plan, Request, Run, make_plan
from dapo_mega.config import dump_config
from dapo_mega.metrics.jsonl import encode_line


def base_file(folder: Path, **sections: object) -> Path:
    """A run's file of 4 steps; `sections` replace or add top-level keys."""
    run = {
        "output_dir": "ignored",
        "num_steps": 4,
        "model": {"path": "model"},
        "data": {"train": {"path": "train.parquet"}, "evaluation": {"path": "eval.parquet"}},
        "rollout": {"max_response_tokens": 64},
        "reward": {"overlong_cache_tokens": 16},
        "algorithm": {"preset": "dapo", "max_generation_rounds": 20},
        "batch": {"groups_per_step": 8, "generation_groups": 12, "mini_batch_groups": 4},
        **sections,
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def plan_of(
    folder: Path,
    *overrides: str,
    rows: tuple[str, ...] = (),
    methods: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0,),
    **sections: object,
) -> Plan:
    file = base_file(folder, **sections)
    return make_plan(Request(folder / "out", file, None, rows, methods, seeds, overrides, processes=1))


def train(
    run: Run, final: float = 0.5, steps: int | None = None, state: str = "finished", exit_status: int = 0
) -> None:
    """What a run leaves whose held-out accuracy rises from 0.25 to `final`; with `steps`, it got no further."""
    reached = run.config.num_steps if steps is None else steps
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.yaml").write_text(dump_config(run.config))
    (run.folder / "versions.json").write_text('{"python": "3.11"}')
    lines = [encode_line(0, {"evaluation/avg_at_k": 0.25, "evaluation/response_length_mean": 20.0})]
    for step in range(1, reached + 1):
        metrics = {"policy/entropy": 1 / step, "rollout/response_length_mean": 20.0 + step, "time/step_s": 30.0}
        if step == run.config.num_steps:
            metrics |= {
                "evaluation/avg_at_k": final,
                "evaluation/response_length_mean": 40.0,
                "evaluation/truncated_share": 0.125,
            }
        lines.append(encode_line(step, metrics))
    (run.folder / "metrics.jsonl").write_text("".join(lines))
    status = {"state": state, "exit_status": exit_status, "step": reached, "message": "" if not exit_status else "why"}
    (run.folder / "status.json").write_text(json.dumps(status))
