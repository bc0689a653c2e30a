"""A whole training run: fresh, resumed, or already finished."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dapo_mega.commands import say
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import FleetError, InputError, StarvedError
from dapo_mega.handover import leaving_together
from dapo_mega.pipeline import Pipeline, build_pipeline, write_run_record
from dapo_mega.plan import describe_run
from dapo_mega.policy.checkpoints import CheckpointStore
from dapo_mega.policy.hf_export import save_hf_checkpoint
from dapo_mega.policy.processes import stop_processes, world_size_from_environment
from dapo_mega.trainer import restore, train

# These may differ between a run and its continuation without changing what is learnt.
_FREE_TO_CHANGE = (
    # Folders may move; the checkpoint knows the training prompts and the model's shape.
    "output_dir",
    "data.train.path",
    "data.evaluation.path",
    "model.path",
    "num_steps",
    "threads_per_process",
    "parallel",
    # Memory, overlap and order of the same arithmetic; compute.fp8 and compute.moe are not among them.
    "compute.fused_output_layer",
    "compute.recompute",
    "compute.recompute_modules",
    "compute.recompute_layers",
    "compute.overlap_grad_reduce",
    "compute.overlap_param_gather",
    "compute.optimizer_offload",
    "compute.deterministic",
    "checkpoint",
    "weight_sync",
    "evaluation",
    "batch.tokens_per_microbatch",
    "rollout.max_batch_rows",
    "rollout.mismatch_warning",
    "rollout.mismatch_stop",
    "rollout.fleet",
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
    store = CheckpointStore.of_run(config.output_dir, config.checkpoint)
    newest = store.latest()
    start_step = int(newest.name.removeprefix("step_")) if newest else 0
    is_exported = (folder / "hf" / "config.json").is_file()
    if newest and not accept_changes:
        _refuse_changes(config, folder)
    if is_exported and not newest:
        raise InputError(
            f"{folder} holds a trained model (hf) but no checkpoint to continue from; give another output_dir, or move "
            f"the folder away"
        )
    if start_step >= config.num_steps and (is_exported or not config.checkpoint.save_hf_at_end):
        say(
            f"{folder} already holds a finished run of {start_step} steps; raise num_steps to continue it, or give "
            f"another output_dir"
        )
        return
    for sentence in store.skipped():
        say(f"WARNING: {sentence}; continuing {f'after step {start_step}' if newest else 'from the start'}")
    pipeline = build_pipeline(config, start_step)
    with contextlib.ExitStack() as stack:
        stack.callback(close, pipeline)
        control = pipeline.policy.processes.control
        _agree_on_start(start_step, folder, control)
        if pipeline.driver:
            stack.enter_context(pipeline.driver.progress)
        if newest:
            restore(pipeline, pipeline.store.load(pipeline.policy, newest))
            if pipeline.driver:
                pipeline.driver.progress.message(f"resuming {folder} after step {start_step}")
        with leaving_together(control):
            if pipeline.driver:
                write_run_record(config)
        _train_and_export(pipeline, folder)
    stop_processes()
    say(f"finished {config.num_steps} steps; metrics for TensorBoard: {folder / 'tensorboard'}")


def _train_and_export(pipeline: Pipeline, folder: Path) -> None:
    try:
        train(pipeline)
    except (StarvedError, FleetError):
        # All processes leave here together; after other errors a checkpoint in writing stays unfinished.
        pipeline.store.finish(pipeline.policy)
        raise
    pipeline.store.finish(pipeline.policy)
    if pipeline.config.checkpoint.save_hf_at_end:
        save_hf_checkpoint(pipeline.policy, folder / "hf")
    dist.barrier(group=pipeline.policy.processes.control)


def close(pipeline: Pipeline) -> None:
    """Release the engines and what rank 0 holds open."""
    pipeline.weight_sync.close()
    pipeline.fleet.close()
    if pipeline.driver:
        pipeline.driver.verifier.close()
        pipeline.driver.writer.close()


def _agree_on_start(start_step: int, folder: Path, control: dist.ProcessGroup) -> None:
    """Every process must see the same checkpoints."""
    steps: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(steps, start_step, group=control)
    if len(set(steps)) > 1:
        raise InputError(
            f"the processes see different checkpoints in {folder / 'checkpoints'} (last steps {sorted(set(steps))}); "
            f"output_dir must be on a file system that all machines share"
        )


def _refuse_changes(config: RunConfig, folder: Path) -> None:
    saved_file = folder / "config.yaml"
    if not saved_file.is_file():
        return
    saved = _flat(load_config(RunConfig, saved_file).model_dump())
    given = _flat(config.model_dump())
    changes = [
        f"{name}: {saved.get(name)!r} -> {given.get(name)!r}"
        for name in sorted(saved.keys() | given.keys())
        if saved.get(name) != given.get(name) and not _is_free(name, config)
    ]
    if changes:
        raise InputError(
            f"{folder} holds checkpoints of a run with another configuration ({'; '.join(changes)}); give another "
            f"output_dir, undo the change, or add --accept-changes to continue with it"
        )


def _is_free(name: str, config: RunConfig) -> bool:
    if name == "model.path" and config.algorithm.kl.coefficient > 0:
        return False  # The reference of the KL penalty is read from there.
    if name == "num_steps" and config.optimizer.schedule != "constant":
        return False  # The learning rate depends on it.
    return name.startswith(_FREE_TO_CHANGE)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
