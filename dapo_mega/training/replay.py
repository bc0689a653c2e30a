"""Replays a recorded step: the same groups, trained on again from the checkpoint before it, with no engine.

A step starts from the weights that the step before made. From a checkpoint that is older, the steps in between are
replayed too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from dapo_mega.algorithms.entropy_control import EntropyControl
from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.checkpoints.folders import CheckpointFolders, step_of
from dapo_mega.config import RunConfig, load_config
from dapo_mega.distributed.processes import world_size_from_environment
from dapo_mega.errors import InputError
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.samples.files import file_of, samples_folder, stored_files
from dapo_mega.samples.reading import RecordedStep, read_account, read_step
from dapo_mega.training.build import entropy_control
from dapo_mega.training.differences import Difference, compare_numbers, compare_samples
from dapo_mega.training.lifecycle import require_model
from dapo_mega.training.loop import adapt_entropy_bonus, restore_entropy
from dapo_mega.training.recording import values_of_trajectories
from dapo_mega.training.recovery import score_groups
from dapo_mega.training.trainer import Trainer

_COMPARED = (
    "policy/", "mismatch/", "critic/", "rollout/logprob_abs_diff_mean", "rollout/logprob_abs_diff_max",
    "rollout/kl_to_policy",
)  # fmt: skip


@dataclass(frozen=True)
class ReplayPlan:
    """How to get to a step: load the checkpoint after step `start`, or the model that the run began with if that is
    None, and replay `steps` in order, the last of which is the one asked for."""

    start: Path | None
    steps: tuple[int, ...]
    recorded_world_size: int


@dataclass(frozen=True)
class Replay:
    """The outcome. `metrics` compares the step's record in metrics.jsonl, `updates` every single update, `tokens` the
    values of tokens and responses; `earlier` has the metrics of the steps before it that had to be replayed."""

    plan: ReplayPlan
    world_size: int
    earlier: tuple[Difference, ...]
    metrics: tuple[Difference, ...]
    updates: tuple[Difference, ...]
    tokens: tuple[Difference, ...]

    @property
    def all(self) -> tuple[Difference, ...]:
        return (*self.earlier, *self.metrics, *self.updates, *self.tokens)


def plan_replay(run_dir: Path, step: int) -> ReplayPlan:
    """Raises InputError if the step cannot be replayed, naming those that can be."""
    if not (run_dir / "config.yaml").is_file():
        raise InputError(f"{run_dir / 'config.yaml'} does not exist; give the output_dir of a run")
    folder = samples_folder(run_dir)
    whole = {file.step: file for file in stored_files(folder) if not file.is_evaluation}
    checkpoints = {step_of(path): path for path in CheckpointFolders(run_dir / "checkpoints", 1).complete_ones()}
    problem = _problem(step, whole.keys(), checkpoints.keys(), folder)
    if problem:
        can = [s for s in sorted(whole) if not _problem(s, whole.keys(), checkpoints.keys(), folder)]
        listed = f"steps {_as_ranges(can)} can be" if can else "no step of it can be"
        raise InputError(f"step {step} of {run_dir} cannot be replayed: {problem}; {listed}")
    start = _start(step, checkpoints.keys())
    account = read_account(file_of(folder, "training", step))
    return ReplayPlan(checkpoints.get(start), tuple(range(start + 1, step + 1)), int(account["world_size"]))


def _start(step: int, checkpoints: Collection[int]) -> int:
    return max((saved for saved in checkpoints if saved < step), default=0)


def _problem(step: int, recorded: Collection[int], checkpoints: Collection[int], folder: Path) -> str | None:
    """Why a step cannot be replayed, or None."""
    start = _start(step, checkpoints)
    needed = range(start + 1, step + 1)
    if step < 1:
        return "steps are counted from 1"
    if missing := [s for s in needed if s not in recorded]:
        after = f" (from the newest checkpoint before it, of step {start})" if start else " (from the first step on)"
        return (
            f"{folder} has no file of step{'s' if len(missing) > 1 else ''} {_as_ranges(missing)}, which were removed, "
            f"not written or not done{after if len(needed) > 1 else ''}"
        )
    for s in needed:
        account = read_account(file_of(folder, "training", s))
        if "updates" not in account:
            return f"step {s} trained on nothing: it found too few groups with a signal"
        if not account.get("all_recorded"):
            return f"of step {s} only some groups were written (samples.groups_per_step)"
    return None


def _as_ranges(steps: Sequence[int]) -> str:
    """As in 1-3, 7."""
    ranges = [[step for _, step in run] for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges)


def load_replay_config(run_dir: Path, overrides: Sequence[str], recorded_world_size: int) -> RunConfig:
    """The run's configuration for a replay in so many processes as were started: in the run's layout if they are as
    many as it had, else data-parallel, unless `overrides` say otherwise."""
    config = load_config(
        RunConfig, run_dir / "config.yaml", [*overrides, f"output_dir={run_dir}", "rollout.mismatch_stop=null"]
    )
    if config.rollout.routing_replay:
        raise InputError(
            f"steps of {run_dir} cannot be replayed: it had rollout.routing_replay=true, and files of samples do not "
            "have the experts of tokens"
        )
    chosen = any(override.startswith("parallel.") for override in overrides)
    if world_size_from_environment() != recorded_world_size and not chosen:
        return config.model_copy(update={"parallel": type(config.parallel)()})
    return config


def replay(run_dir: Path, step: int, overrides: Sequence[str] = (), tolerance: float = 1e-5) -> Replay | None:
    """Replay a step in all processes that were started; returns what differs on rank 0, None on the others. Writes
    nothing. Raises InputError if the step cannot be replayed."""
    plan = plan_replay(run_dir, step)
    config = load_replay_config(run_dir, overrides, plan.recorded_world_size)
    require_model(config)
    trainer = Trainer(config, start_processes(config.parallel, config.seed))
    found = None
    if trainer.processes.rank:
        trainer.obey()
    else:
        with trainer.commanding():
            found = _compare(trainer, config, plan, run_dir, tolerance)
    stop_processes()
    return found


def _compare(trainer: Trainer, config: RunConfig, plan: ReplayPlan, run_dir: Path, tolerance: float) -> Replay:
    trainer.build(with_engines=False)
    entropy = entropy_control(config)
    if plan.start:
        restore_entropy(entropy, trainer.load(plan.start))
    logged = _logged(run_dir)
    earlier: list[Difference] = []
    for step in plan.steps[:-1]:
        _, metrics, _, _ = _replay_one(trainer, config, entropy, run_dir, step)
        earlier += compare_numbers(logged.get(step, {}), metrics, tolerance, f" of step {step}")
    step = plan.steps[-1]
    recorded, metrics, updates, values = _replay_one(trainer, config, entropy, run_dir, step)
    return Replay(
        plan,
        trainer.facts.world_size,
        tuple(earlier),
        tuple(compare_numbers(logged.get(step, {}), metrics, tolerance)),
        tuple(
            difference
            for i, (before, after) in enumerate(zip(recorded.account["updates"], updates, strict=False))
            for difference in compare_numbers(before, after, tolerance, f" of update {i + 1}")
        ),
        tuple(compare_samples(recorded.samples, values, tolerance)),
    )


def _replay_one(
    trainer: Trainer, config: RunConfig, entropy: EntropyControl, run_dir: Path, step: int
) -> tuple[RecordedStep, dict[str, float], Sequence[Mapping[str, float]], list[Any]]:
    """Train on a step's recorded groups. Returns what was recorded, metrics, updates and the tokens' values."""
    recorded = read_step(file_of(samples_folder(run_dir), "training", step))
    groups = recorded.groups
    trainer.take(samples_of_groups(groups, config, step - 1))
    measured, metrics = score_groups(trainer, config, groups, step - 1)
    updated = trainer.update(entropy.current(), traced=True)
    metrics = {**(measured.metrics if measured else {}), **metrics, **updated.metrics}
    adapt_entropy_bonus(entropy, config, metrics)
    values = values_of_trajectories(trainer, config, groups, range(len(groups)))
    return recorded, metrics, updated.updates, values


def _logged(run_dir: Path) -> Mapping[int, Mapping[str, float]]:
    """By step, the recorded metrics that training on its groups decides."""
    try:
        records = read_metrics(run_dir / "metrics.jsonl")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(str(error)) from error
    return {int(r["step"]): {name: r[name] for name in r if name.startswith(_COMPARED)} for r in records}
