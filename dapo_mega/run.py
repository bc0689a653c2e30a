"""A whole training run: fresh, resumed, or already finished."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dapo_mega.commands import say
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.pipeline import Pipeline, build_pipeline, write_run_record
from dapo_mega.plan import describe_run
from dapo_mega.policy.checkpoints import CheckpointStore
from dapo_mega.policy.hf_export import save_hf_checkpoint
from dapo_mega.policy.processes import stop_processes, world_size_from_environment
from dapo_mega.trainer import restore, train

# These may differ between a run and its continuation without changing what is learnt.
_FREE_TO_CHANGE = (
    "num_steps",
    "threads_per_process",
    "parallel",
    "checkpoint",
    "weight_sync",
    "evaluation",
    "batch.tokens_per_microbatch",
    "rollout.max_batch_rows",
    "rollout.mismatch_warning",
    "reward.num_workers",
    "model.architecture",
)


def run_training(config: RunConfig, *, accept_changes: bool = False) -> None:
    """Train until `num_steps`, continuing from the newest checkpoint when there is one.

    Raises InputError when the run's folder belongs to another configuration, unless changes are accepted.
    """
    folder = Path(config.output_dir)
    describe_run(config, world_size_from_environment())
    if not Path(config.model.path).is_dir():
        raise InputError(f"model.path={config.model.path} does not exist; give a folder with a Hugging Face checkpoint")
    newest = CheckpointStore(folder / "checkpoints", config.checkpoint.keep_last).latest()
    start_step = int(newest.name.removeprefix("step_")) if newest else 0
    if newest and not accept_changes:
        _refuse_changes(config, folder)
    if start_step >= config.num_steps:
        say(
            f"{folder} already holds a finished run of {start_step} steps; raise num_steps to continue it, or give "
            f"another output_dir"
        )
        return
    pipeline = build_pipeline(config, start_step)
    with contextlib.ExitStack() as stack:
        stack.callback(close, pipeline)
        if pipeline.driver:
            stack.enter_context(pipeline.driver.progress)
            write_run_record(config)
        if newest:
            restore(pipeline, pipeline.store.load(pipeline.policy, newest))
            if pipeline.driver:
                pipeline.driver.progress.message(f"resuming {folder} after step {start_step}")
        _train_and_export(pipeline, folder)
    stop_processes()
    say(f"finished {config.num_steps} steps; metrics for TensorBoard: {folder / 'tensorboard'}")


def _train_and_export(pipeline: Pipeline, folder: Path) -> None:
    train(pipeline)
    if pipeline.config.checkpoint.save_hf_at_end:
        save_hf_checkpoint(pipeline.policy, folder / "hf")
    dist.barrier(group=pipeline.policy.processes.control)


def close(pipeline: Pipeline) -> None:
    """Release the engines and what rank 0 holds open."""
    pipeline.fleet.close()
    if pipeline.driver:
        pipeline.driver.verifier.close()
        pipeline.driver.writer.close()


def _refuse_changes(config: RunConfig, folder: Path) -> None:
    saved_file = folder / "config.yaml"
    if not saved_file.is_file():
        return
    saved = _flat(load_config(RunConfig, saved_file).model_dump())
    given = _flat(config.model_dump())
    changes = [
        f"{name}: {saved.get(name)!r} -> {given.get(name)!r}"
        for name in sorted(saved.keys() | given.keys())
        if saved.get(name) != given.get(name) and not name.startswith(_FREE_TO_CHANGE)
    ]
    if changes:
        raise InputError(
            f"{folder} holds checkpoints of a run with another configuration ({'; '.join(changes)}); give another "
            f"output_dir, undo the change, or add --accept-changes to continue with it"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
