"""What a run writes of its responses: the groups of every step with what training computed, and evaluations."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dapo_mega.batching.step_advantages import is_in_loss, step_advantages
from dapo_mega.config import RunConfig
from dapo_mega.evaluation.evaluator import EvaluatedResponse
from dapo_mega.evaluation.settings import evaluation_settings
from dapo_mega.samples.files import discard_after, samples_folder
from dapo_mega.samples.recorder import SampleRecorder
from dapo_mega.samples.rows import Floats, SampleFile, Training, rows_of, rows_of_evaluation
from dapo_mega.samples.token_values import by_trajectory
from dapo_mega.training.build import TrainingRun
from dapo_mega.training.recovery import with_trainer
from dapo_mega.training.trainer import Trainer
from dapo_mega.types import Group, GroupFate

Metrics = dict[str, float]


def open_recorder(config: RunConfig, tokenizer: Any, last_step: int) -> SampleRecorder | None:
    """The recorder of a run that has done `last_step` steps, if it records."""
    if not config.samples.enabled:
        with contextlib.suppress(OSError):  # Of steps that an earlier process did, and that are now done again.
            discard_after(samples_folder(config.output_dir), last_step)
        return None
    return SampleRecorder(config.output_dir, config.samples, tokenizer, last_step)


def record_evaluation(run: TrainingRun, step: int, results: Sequence[EvaluatedResponse]) -> None:
    """Write the responses of the evaluation of this step's weights."""
    if run.recorder:
        account = {"settings": evaluation_settings(run.config)}
        run.recorder.write(SampleFile(step, "evaluation", rows_of_evaluation(results), account))


def record_step(run: TrainingRun, groups: Sequence[Group], updates: Sequence[Metrics]) -> None:
    """Write the groups of the step just done, with what its updates computed."""
    assert run.recorder
    fates = run.collector.pop_fates()
    # As they were trained on, with what teachers said.
    fates = [*(replace(f, group=group) for f, group in zip(fates, groups, strict=False)), *fates[len(groups) :]]
    chosen = _chosen(fates, run.config, run.step)
    values = with_trainer(run, lambda: values_of_trajectories(run.trainer, run.config, groups, chosen))
    ids = (member.id for group in groups for member in group.trajectories)
    training = dict(zip(ids, _training(run.config, groups, values), strict=True))
    rows = [
        replace(row, training=training.get(row.trajectory.id)) if fates[i].outcome == "trained" else row
        for i in chosen
        for row in rows_of(fates[i])
    ]
    account = {**_account(run, fates, len(chosen)), "updates": updates}
    run.recorder.write(SampleFile(run.step, "training", rows, account))


def record_starved_step(run: TrainingRun) -> None:
    """Write the groups of a step that found too few to train on."""
    if run.recorder:
        fates = run.collector.pop_fates()
        chosen = _chosen(fates, run.config, run.step + 1)
        rows = [row for i in chosen for row in rows_of(fates[i])]
        run.recorder.write(SampleFile(run.step + 1, "training", rows, _account(run, fates, len(chosen))))
        run.recorder.flush()


def _chosen(fates: Sequence[GroupFate], config: RunConfig, step: int) -> Sequence[int]:
    """The groups to write, in order."""
    wanted = config.samples.groups_per_step
    if wanted is None or wanted >= len(fates):
        return range(len(fates))
    return sorted(np.random.default_rng([config.seed, step]).choice(len(fates), wanted, replace=False).tolist())


def values_of_trajectories(
    trainer: Trainer, config: RunConfig, groups: Sequence[Group], chosen: Sequence[int]
) -> list[tuple[Floats, Floats]]:
    """For every trajectory: log-probs at the step's start with its advantages [2, R], and of the last update [1, R].
    NaN in groups that are not chosen, and where nothing was computed. `chosen` are numbers of groups; all count unless
    `samples.groups_per_step` is set."""
    members = [(number, group.prompt, member) for number, group in enumerate(groups) for member in group.trajectories]
    places = [
        (i, start - len(prompt.token_ids) * has_prompt)
        for i, (_, prompt, member) in enumerate(members)
        for start, _, has_prompt in member.pieces
    ]
    wanted = None
    if config.samples.groups_per_step is not None:
        # Trained groups come first among the fates, in the order of their samples.
        wanted = [sample for sample, (i, _) in enumerate(places) if members[i][0] in set(chosen)]
    found = [runs for runs in trainer.token_values(wanted) if runs]
    lengths = [member.num_rows for *_, member in members]
    at_start = by_trajectory([start for start, _ in found], 2, places, lengths)
    at_update = by_trajectory([update for _, update in found], 1, places, lengths)
    return list(zip(at_start, at_update, strict=True))


def _training(
    config: RunConfig, groups: Sequence[Group], values: Sequence[tuple[Floats, Floats]]
) -> Iterator[Training]:
    """What training knows about each trajectory of the step, in order."""
    has_tokens = config.algorithm.has_token_rewards or config.distillation is not None
    advantages = np.zeros(len(values)) if has_tokens else step_advantages(groups, config)
    members = [member for group in groups for member in group.trajectories]
    for i, (scored, (at_start, at_update)) in enumerate(zip(members, values, strict=True)):
        of_tokens, sampled = at_start[1], at_start[1][scored.sampled]
        yield Training(
            sample=i,
            advantage=float(sampled.mean(dtype=np.float64)) if has_tokens else float(advantages[i]),
            in_loss=is_in_loss(scored, config),
            trainer_logprobs=at_start[0],
            update_logprobs=None if np.isnan(at_update).all() else at_update[0],
            advantages=of_tokens if has_tokens and (sampled != sampled[0]).any() else None,
        )


def _account(run: TrainingRun, fates: Sequence[GroupFate], num_recorded: int) -> dict[str, Any]:
    """Where all groups of the step went, recorded or not, and in which layout."""
    return {
        "groups": dict(sorted(Counter(fate.outcome for fate in fates).items())),
        "recorded_groups": num_recorded,
        "all_recorded": num_recorded == len(fates),
        **run.collector.left_over,
        "world_size": run.trainer.facts.world_size,
        "parallel": run.config.parallel.model_dump(mode="json"),
    }
