"""What a run writes of its responses: the groups of every step with what training computed, and evaluations."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.batching.step_advantages import is_in_loss, step_advantages
from dapo_mega.config import RunConfig
from dapo_mega.evaluation.evaluator import EvaluatedResponse
from dapo_mega.evaluation.settings import evaluation_settings
from dapo_mega.megatron.megatron_policy import TokenScores
from dapo_mega.megatron.objectives import TokenBatch
from dapo_mega.samples.files import discard_after, samples_folder
from dapo_mega.samples.recorder import SampleRecorder
from dapo_mega.samples.rows import Floats, SampleFile, Training, rows_of, rows_of_evaluation
from dapo_mega.samples.token_values import TokenRuns, by_trajectory, gather_runs, runs_of
from dapo_mega.training.build import Controller, TrainingRun
from dapo_mega.training.scoring import ScoredStep
from dapo_mega.types import Group, GroupFate

Metrics = dict[str, float]


@dataclass
class UpdateTrace:
    """What a step's updates computed, on each rank: log-probs [N] of the response tokens of `batches` under the weights
    that the step starts from, those of the tokens that later updates used, and every update's metrics in order."""

    batches: list[MicroBatch] = field(default_factory=list)
    start_logprobs: list[Tensor] = field(default_factory=list)
    updated: dict[int, tuple[MicroBatch, Tensor]] = field(default_factory=dict)
    updates: list[Metrics] = field(default_factory=list)

    def add_start(self, batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> None:
        """All micro-batches of the step, and their tokens' log-probs under the first weights."""
        self.batches += batches
        self.start_logprobs += logprobs

    def add_scored(self, scored: ScoredStep) -> None:
        """`add_start` of a step that was scored before its updates."""
        for mini_batch in scored.mini_batches:
            for batch in mini_batch:
                if batch.old_logprobs is not None:
                    self.add_start([batch.micro_batch], [batch.old_logprobs])

    def add_update(self, metrics: Metrics, batches: Sequence[TokenBatch], scores: Sequence[TokenScores]) -> None:
        """An update; of the scores of several passes over the same tokens the last count."""
        self.updates.append(dict(metrics))
        for batch, score in zip(batches, scores, strict=False):
            self.updated[id(batch)] = (batch.micro_batch, score.logprobs)


def open_recorder(config: RunConfig, tokenizer: Any, last_step: int) -> SampleRecorder | None:
    """The recorder of a run that has done `last_step` steps, if it records."""
    if not config.samples.enabled:
        with contextlib.suppress(OSError):  # Of steps that an earlier process did, and that are now done again.
            discard_after(samples_folder(config.output_dir), last_step)
        return None
    return SampleRecorder(config.output_dir, config.samples, tokenizer, last_step)


def record_evaluation(run: TrainingRun, step: int, results: Sequence[EvaluatedResponse]) -> None:
    """Write the responses of the evaluation of this step's weights, on rank 0."""
    assert run.controller
    if recorder := run.controller.recorder:
        account = {"settings": evaluation_settings(run.config)}
        recorder.write(SampleFile(step, "evaluation", rows_of_evaluation(results), account))


def record_step(run: TrainingRun, groups: Sequence[Group], trace: UpdateTrace) -> None:
    """Write the groups of the step just done. Collective; only rank 0 has groups and writes."""
    chosen: Sequence[int] = ()
    fates: list[GroupFate] = []
    if run.controller:
        fates = run.controller.collector.pop_fates()
        chosen = _chosen(fates, run.config, run.step)
    values = values_of_trajectories(run, groups, chosen, trace)
    if run.controller:
        assert run.controller.recorder
        training = dict(zip(_ids(groups), _training(run.config, groups, values), strict=True))
        rows = [
            replace(row, training=training.get(row.trajectory.id)) if fates[i].outcome == "trained" else row
            for i in chosen
            for row in rows_of(fates[i])
        ]
        account = _account(run, run.controller, fates, len(chosen), trace)
        run.controller.recorder.write(SampleFile(run.step, "training", rows, account))


def record_starved_step(run: TrainingRun) -> None:
    """Write, on rank 0, the groups of a step that found too few to train on."""
    if run.controller and run.controller.recorder:
        fates = run.controller.collector.pop_fates()
        chosen = _chosen(fates, run.config, run.step + 1)
        rows = [row for i in chosen for row in rows_of(fates[i])]
        account = _account(run, run.controller, fates, len(chosen))
        run.controller.recorder.write(SampleFile(run.step + 1, "training", rows, account))
        run.controller.recorder.flush()


def _chosen(fates: Sequence[GroupFate], config: RunConfig, step: int) -> Sequence[int]:
    """The groups to write, in order."""
    wanted = config.samples.groups_per_step
    if wanted is None or wanted >= len(fates):
        return range(len(fates))
    return sorted(np.random.default_rng([config.seed, step]).choice(len(fates), wanted, replace=False).tolist())


def _ids(groups: Sequence[Group]) -> Iterator[int]:
    """The ids of a step's trajectories, in order."""
    return (member.id for group in groups for member in group.trajectories)


def values_of_trajectories(
    run: TrainingRun, groups: Sequence[Group], chosen: Sequence[int], trace: UpdateTrace
) -> list[tuple[Floats, Floats]]:
    """On rank 0, for every trajectory: log-probs at the step's start with its advantages [2, R], and of the last update
    [1, R]. NaN in groups that are not chosen, and where nothing was computed. `chosen`, which rank 0 gives, are numbers
    of groups; all count unless `samples.groups_per_step` is set."""
    processes = run.policy.processes
    members = [(number, group.prompt, member) for number, group in enumerate(groups) for member in group.trajectories]
    places = [
        (i, start if start else -len(prompt.token_ids))
        for i, (_, prompt, member) in enumerate(members)
        for start in (0, *member.segments[:-1])
    ]
    wanted: list[Any] = [None]
    if run.config.samples.groups_per_step is not None:
        # Trained groups come first among the fates, in the order of their samples.
        wanted = [[sample for sample, (i, _) in enumerate(places) if members[i][0] in set(chosen)]]
        dist.broadcast_object_list(wanted, src=0, group=processes.control)
    own_start = own_update = None
    if processes.counts_outputs:
        advantages = [micro.advantages for micro in trace.batches]
        own_start = _only(runs_of(trace.batches, [trace.start_logprobs, advantages]), wanted[0])
        updated = list(trace.updated.values())
        own_update = _only(runs_of([m for m, _ in updated], [[logprobs for _, logprobs in updated]]), wanted[0])
    starts, updates = gather_runs(own_start, 2, processes), gather_runs(own_update, 1, processes)
    lengths = [member.num_rows for *_, member in members]
    at_start, at_update = by_trajectory(starts, 2, places, lengths), by_trajectory(updates, 1, places, lengths)
    return list(zip(at_start, at_update, strict=True))


def _only(runs: TokenRuns, samples: Sequence[int] | None) -> TokenRuns:
    """The runs of these samples; None: all."""
    if samples is None:
        return runs
    keep = np.isin(runs.places[:, 0], samples)
    return TokenRuns(runs.places[keep], np.ascontiguousarray(runs.values[:, np.repeat(keep, runs.places[:, 2])]))


def _training(
    config: RunConfig, groups: Sequence[Group], values: Sequence[tuple[Floats, Floats]]
) -> Iterator[Training]:
    """What training knows about each trajectory of the step, in order."""
    has_tokens = config.algorithm.has_token_rewards
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


def _account(
    run: TrainingRun,
    controller: Controller,
    fates: Sequence[GroupFate],
    num_recorded: int,
    trace: UpdateTrace | None = None,
) -> Mapping[str, Any]:
    """Where all groups of the step went, recorded or not, and what a replay compares with; nothing of the latter where
    the step trained on none."""
    return {
        "groups": dict(sorted(Counter(fate.outcome for fate in fates).items())),
        "recorded_groups": num_recorded,
        "all_recorded": num_recorded == len(fates),
        **controller.collector.left_over,
        "world_size": run.policy.processes.world_size,
        "parallel": run.config.parallel.model_dump(mode="json"),
        **({"updates": trace.updates} if trace else {}),
    }
