"""What a step measures before its updates: log-probs of policy and reference, mismatch, values, token advantages."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_mega.algorithms.advantages import GaeAdvantage
from dapo_mega.algorithms.policy_losses import ClipCovLoss, KlCovLoss
from dapo_mega.algorithms.ratios import kl_estimate, mean_over
from dapo_mega.batching.microbatch import MicroBatch
from dapo_mega.batching.step import StepBatch
from dapo_mega.batching.step_advantages import step_advantages
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.covariance import choose_tokens
from dapo_mega.megatron.megatron_policy import TokenScores
from dapo_mega.megatron.mismatch import measure_engines, measure_mismatch, mismatch_warning
from dapo_mega.megatron.objectives import TokenBatch
from dapo_mega.megatron.token_advantages import (
    advantages_from_values,
    advantages_of_responses,
    normalized,
    subtract_following_penalties,
)
from dapo_mega.megatron.value_loss import ValueBatch
from dapo_mega.training.build import TrainingRun
from dapo_mega.types import Group

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metrics = dict[str, float]


@dataclass(frozen=True)
class ScoredStep:
    """A step's mini-batches of this rank, with what its updates start from; `critic_batches` is empty without a
    critic."""

    mini_batches: list[list[TokenBatch]]
    critic_batches: list[list[ValueBatch]]
    metrics: Metrics


def score(run: TrainingRun, batch: StepBatch, groups: Sequence[Group] = ()) -> ScoredStep:
    """pi_old <- pi_theta: score every response token with the weights the step starts from, by the reference, and by
    the critic.

    A KL penalty in the reward and the critic's values then become part of the advantages; rank 0 has the step's groups
    for that. Also measures the mismatch of the engines' log-probs, and raises FleetError on all ranks if it is over
    `rollout.mismatch_stop`. A step with a single update needs no scoring pass: the update starts from these weights,
    scores the tokens itself, and raises before its checkpoint is written.
    """
    everything = [micro for mini_batch in batch.mini_batches for micro in mini_batch]
    references = run.reference.score(everything) if run.reference else [None] * len(everything)
    scores: Sequence[TokenScores | None] = [None] * len(everything)
    metrics: Metrics = {}
    critic_batches: list[list[ValueBatch]] = []
    if run.config.scores_before_updates:
        own = scores = run.policy.score(everything)
        metrics = check_scores(run, everything, own, batch.engines)
    if run.config.algorithm.has_token_rewards:
        kl = _kl_to_reference(run, own, references) if run.config.algorithm.penalizes_rewards else None
        values = run.critic.score(everything) if run.critic else None
        everything, returns = _new_advantages(run, everything, kl, values, groups)
        if kl is not None:
            metrics["policy/kl_to_reference"] = _mean(kl, run.policy.processes)
        if values is not None:
            value_batches = [ValueBatch(*fields) for fields in zip(everything, values, returns, strict=True)]
            critic_batches = _by_mini_batch(value_batches, batch)
    token_batches = [
        TokenBatch(micro_batch, score.logprobs if score else None, reference.logprobs if reference else None)
        for micro_batch, score, reference in zip(everything, scores, references, strict=True)
    ]
    mini_batches = _by_mini_batch(token_batches, batch)
    loss = run.config.algorithm.policy_loss
    if isinstance(loss, ClipCovLoss | KlCovLoss):
        mini_batches = [choose_tokens(mini, loss, run.policy.processes, seed=run.step) for mini in mini_batches]
    return ScoredStep(mini_batches, critic_batches, metrics)


def _by_mini_batch(of_micro_batches: Sequence[T], batch: StepBatch) -> list[list[T]]:
    remaining = iter(of_micro_batches)
    return [[next(remaining) for _ in mini_batch] for mini_batch in batch.mini_batches]


def _kl_to_reference(
    run: TrainingRun, own: Sequence[TokenScores], references: Sequence[TokenScores | None]
) -> list[Tensor]:
    """KL of every response token [N], by micro-batch."""
    estimator = run.config.algorithm.kl.estimator
    return [
        kl_estimate(scores.logprobs, reference.logprobs, estimator)
        for scores, reference in zip(own, references, strict=True)
        if reference
    ]


def _new_advantages(
    run: TrainingRun,
    batches: Sequence[MicroBatch],
    kl: Sequence[Tensor] | None,
    values: Sequence[Tensor] | None,
    groups: Sequence[Group],
) -> tuple[list[MicroBatch], list[Tensor]]:
    """The micro-batches with advantages from the penalties and the critic's values, and the critic's returns."""
    algorithm, processes = run.config.algorithm, run.policy.processes
    penalties = [algorithm.kl.coefficient * of_tokens for of_tokens in kl] if kl is not None else None
    returns: list[Tensor] = []
    if isinstance(algorithm.advantage, GaeAdvantage):
        assert values is not None
        changed, returns = advantages_from_values(
            batches,
            values,
            penalties,
            processes,
            discount=algorithm.advantage.discount,
            decay=algorithm.advantage.decay,
        )
    else:
        assert penalties is not None
        if algorithm.advantage.compares_group:
            compute = (lambda sums: step_advantages(groups, run.config, sums)) if run.controller else None
            return advantages_of_responses(batches, penalties, processes, compute), returns
        changed = subtract_following_penalties(batches, penalties, processes)
    return (normalized(changed, processes) if algorithm.normalize_advantages else changed), returns


def _mean(of_tokens: Sequence[Tensor], processes: Processes) -> float:
    """The mean over all response tokens of the step."""
    sums = torch.zeros(2, dtype=torch.float64)
    for values in of_tokens if processes.counts_outputs else ():
        sums += torch.stack([values.double().sum().cpu(), torch.tensor(float(len(values)))])
    dist.all_reduce(sums, group=processes.control)
    return mean_over(*sums.tolist())


def check_scores(
    run: TrainingRun, batches: Sequence[MicroBatch], scores: Sequence[TokenScores], engines: Sequence[str]
) -> Metrics:
    """`measure_scores` that warns of a mismatch, and raises FleetError on all ranks if it is over
    `rollout.mismatch_stop`."""
    metrics, by_engine = measure_scores(run, batches, scores, engines)
    message = mismatch_warning(metrics, run.config, run.step + 1, by_engine)
    if message and run.controller:
        logger.warning(message)
    return metrics


def measure_scores(
    run: TrainingRun, batches: Sequence[MicroBatch], scores: Sequence[TokenScores], engines: Sequence[str]
) -> tuple[Metrics, Metrics]:
    """Mismatch and entropy of scored micro-batches, and the mean mismatch by engine; `engines[i]` is engine i's URL."""
    processes = run.policy.processes
    counted = zip(batches, scores, strict=True) if processes.counts_outputs else ()
    scored = [(micro_batch, score.logprobs) for micro_batch, score in counted]
    if run.counts is not None:
        for micro_batch, logprobs in scored:
            run.counts.importance_weights.add(logprobs - micro_batch.rollout_logprobs.to(logprobs.device))
    metrics = measure_mismatch(scored, run.config.objective, control=processes.control, context_group=processes.context)
    if any(map(math.isnan, metrics.values())):
        run.is_intact = False  # As the weights may not be numbers.
    by_engine = measure_engines(scored, engines, control=processes.control) if engines else {}
    return {"policy/entropy": _mean([score.entropy for score in scores], processes), **metrics}, by_engine
