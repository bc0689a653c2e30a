"""A whole training run: fresh, resumed, or already finished."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from dapo_mega.checkpoints.folders import step_of
from dapo_mega.checkpoints.store import CheckpointStore
from dapo_mega.cli import is_rank_zero, print_once
from dapo_mega.config import RunConfig
from dapo_mega.distributed.links import follow
from dapo_mega.distributed.processes import world_size_from_environment
from dapo_mega.errors import FleetError, InputError, StarvedError, StopRequested
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.planning.plan import describe_run
from dapo_mega.rewards.build import log_functions
from dapo_mega.training.build import (
    RunInputs,
    RunRewards,
    TrainingRun,
    build_run,
    make_rewards,
    read_inputs,
    try_rewards,
)
from dapo_mega.training.evaluation_beside import is_recorded
from dapo_mega.training.lifecycle import (
    begin_training,
    find_checkpoint,
    held_folder,
    require_model,
    require_trackers,
    watched,
)
from dapo_mega.training.loop import lend_memory, restore, saving, train, with_trainer
from dapo_mega.training.process_watch import ProcessWatch
from dapo_mega.training.resume import refuse_changes
from dapo_mega.training.run_lock import is_locked
from dapo_mega.training.run_records import write_run_record
from dapo_mega.training.run_status import RunStatus
from dapo_mega.training.trainer import Trainer


def run_training(config: RunConfig, *, accept_changes: bool = False) -> None:
    """Train until `num_steps`, from the newest checkpoint if there is one.

    Raises InputError if another trainer uses the run's folder, or if the folder belongs to another configuration and
    changes are not accepted. Raises StopRequested after SIGTERM, once the last step is saved.
    """
    with watched(config) as (status, watch):
        describe_run(config, world_size_from_environment())
        if is_finished(config, status, accept_changes):
            return
        _train(config, status, watch, accept_changes)
    stop_processes()
    folder = Path(config.output_dir)
    model = f"; the model: {folder / 'hf'}" if config.checkpoint.save_hf_at_end else ""
    print_once(f"finished {config.num_steps} steps{model}; metrics for TensorBoard: {folder / 'tensorboard'}")


def is_finished(config: RunConfig, status: RunStatus, accept_changes: bool) -> bool:
    """Whether the run is finished already; prints so. Writes nothing else. Raises InputError if the run cannot
    start."""
    folder = Path(config.output_dir)
    require_model(config)
    require_trackers(config)
    store = CheckpointStore.of_run(config.output_dir, config.checkpoint)
    newest = store.latest()
    start_step = step_of(newest) if newest else 0
    is_exported = (folder / "hf" / "config.json").is_file()
    is_complete = False
    if newest:
        # It may have been stopped before it had recorded its last step, or an evaluation.
        under_way = store.evaluation_under_way(newest)
        has_recorded = not store.has_unrecorded_step(newest) or is_recorded(config.output_dir, start_step, "")
        is_complete = has_recorded and (under_way is None or is_recorded(config.output_dir, under_way))
        refuse_changes(config, folder, accepted=accept_changes)
    _refuse_lost_checkpoints(folder, newest)
    if start_step >= config.num_steps and is_complete and (is_exported or not config.checkpoint.save_hf_at_end):
        print_once(
            f"{folder} already holds a finished run of {start_step} steps; raise num_steps to continue it, or give "
            f"another output_dir"
        )
        if is_rank_zero() and not status.is_finished() and not is_locked(folder):
            status.finished()
        return True
    return False


def _refuse_lost_checkpoints(folder: Path, newest: Path | None) -> None:
    if (folder / "hf" / "config.json").is_file() and not newest:
        raise InputError(
            f"{folder} holds a trained model (hf) but no checkpoint to continue from; give another output_dir, or move "
            f"the folder away"
        )


def _train(config: RunConfig, status: RunStatus, watch: ProcessWatch, accept_changes: bool) -> None:
    """As one of the trainer's processes."""
    with contextlib.ExitStack() as stack:
        rewards, is_apart = None, config.controller.own_process
        if not is_apart:
            inputs = read_inputs(config)
            print_once(inputs.preview)
            if is_rank_zero():
                rewards = make_rewards(config)
                stack.callback(rewards.close)
                try_rewards(config, rewards, inputs.train_prompts.prompts[0])
        processes = start_processes(config.parallel, config.seed)
        watch.follow_peers(group_is_up=True)
        began = watch.begin_training if is_apart else partial(begin_training, status, watch)
        trainer = Trainer(config, processes, began, watch.check_stop)
        stack.callback(trainer.close)
        if processes.rank:
            status.completed_step = lambda: trainer.step
            trainer.obey()
        else:
            with trainer.commanding():
                if rewards:
                    command_run(config, trainer, inputs, rewards, status, watch.check_stop)
                else:
                    from dapo_mega.training.controller import linked

                    with linked(config, accept_changes, watch.check_stop) as link:
                        follow(trainer, link, watch.stop_requested)
        watch.forget_peers()
        dist.barrier(group=processes.control)


def command_run(
    config: RunConfig,
    trainer: Trainer,
    inputs: RunInputs,
    rewards: RunRewards,
    status: RunStatus,
    check_stop: Callable[[], None],
    meet: Callable[[], None] | None = None,
) -> None:
    """The run as the process sees it that commands. `meet` waits for another trainer where one dies that is not of this
    process."""
    folder = Path(config.output_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held_folder(folder, status))
        newest = find_checkpoint(trainer)
        _refuse_lost_checkpoints(folder, newest)
        start_step = step_of(newest) if newest else 0
        status.completed_step = lambda: start_step
        status.running()
        run = build_run(config, start_step, trainer=trainer, inputs=inputs, rewards=rewards, check_stop=check_stop)
        stack.callback(close, run)
        run.meet = meet if config.rollout.placement != "embedded" else None
        if newest:
            restore(run, trainer.load(newest))
        status.completed_step = lambda: run.step
        write_run_record(config, inputs.cards)
        log_functions(rewards.training, folder / "reward_output.log")
        run.environment.log_to(folder / "environment_output.log")
        stack.enter_context(run.progress)
        if newest:
            run.progress.message(f"resuming {folder} after step {start_step}")
        trainer.begin()
        _train_and_export(run)
        status.finished()


def _train_and_export(run: TrainingRun) -> None:
    try:
        train(run)
    except StopRequested:
        stopped = saving(run).before_stop(run.step)
        lend_memory(run)
        raise stopped from None
    except (StarvedError, FleetError, InputError) as error:
        if run.is_intact:
            told = saving(run).before_error(error, run.step)
            lend_memory(run)
            raise told from error
        if isinstance(error, FleetError):
            run.trainer.finish_saving()
        raise
    with_trainer(run, saving(run).export_last)
    lend_memory(run)


def close(run: TrainingRun) -> None:
    """Close the engines, rewards, writer and recorder."""
    if run.beside:
        run.beside.close()
    run.fleet.close()
    run.rewards.close()
    run.environment.close()
    if run.recorder:
        run.recorder.close()
    if run.writer:  # Last, as it may wait for trackers.
        run.writer.close(is_finished=run.step >= run.config.num_steps and run.unrecorded is None)
