"""The training loop: roll out, filter, pack, update, sync. `train` follows Algorithm 1 of the paper."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from dapo_mega.batching.plan import PackingStats
from dapo_mega.batching.samples import samples_of_groups, samples_to_score
from dapo_mega.batching.step import StepBatch
from dapo_mega.checkpoints.store import EVALUATION_UNDER_WAY, LoopState
from dapo_mega.config import RunConfig
from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.errors import FleetError, InputError, StarvedError, at_step
from dapo_mega.megatron.megatron_policy import TokenScores
from dapo_mega.megatron.mismatch import starvation_cause
from dapo_mega.megatron.objectives import PolicyGradient, needs_whole_trajectories
from dapo_mega.megatron.value_loss import ValueLoss
from dapo_mega.metrics import Histogram
from dapo_mega.training.build import Controller, TrainingRun
from dapo_mega.training.evaluating import (
    begin_beside,
    evaluation_is_due,
    evaluation_line,
    settle_beside,
    take_up_interrupted,
)
from dapo_mega.training.histograms import StepCounts
from dapo_mega.training.lifecycle import Saving, refuse_other_data
from dapo_mega.training.process_watch import stop_together
from dapo_mega.training.recording import UpdateTrace, open_recorder, record_evaluation, record_starved_step, record_step
from dapo_mega.training.run_records import open_timeline, open_writer
from dapo_mega.training.scoring import ScoredStep, check_scores, measure_scores, score
from dapo_mega.types import Group

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metrics = dict[str, float]


def train(run: TrainingRun) -> None:
    """Run the remaining steps. The weights at step s have version s; version 0 starts the run.

    Raises StopRequested, on all ranks, when the run was asked to stop: between steps, while responses are generated or
    after a step's update. The run then continues from `loop_state`.
    """
    begin(run)
    while run.step < run.config.num_steps:
        groups, collected = collect_step(run)
        learn(run, groups, collected)
    end(run)


def begin(run: TrainingRun) -> None:
    """Open the records, send the weights to the engines, and evaluate where that is due before a step."""
    config = run.config
    is_interrupted = False
    with raise_on_all_ranks(run.policy.processes.control):
        if run.controller:
            open_records(run, run.controller)
            is_interrupted = take_up_interrupted(run, run.controller)
    if run.unrecorded is not None:
        complete_step(run, run.unrecorded)
    else:
        send_weights(run)
        if run.step == 0 and config.evaluation.at_start:
            report(run, 0, evaluate(run))
        elif config.evaluation.beside_training:
            begin_beside(run, again=is_interrupted)


def collect_step(run: TrainingRun) -> tuple[Sequence[Group], Metrics]:
    """The next step's groups, on rank 0, and the metrics of what was generated."""
    run.is_intact = True
    stop_if_requested(run)
    run.counts = StepCounts() if gets_histograms(run.config, run.step + 1) else None
    with run.timers.stage("rollout"):
        return collect(run)


def learn(run: TrainingRun, groups: Sequence[Group], collected: Metrics) -> Metrics:
    """Score the groups, update the models, and complete the step. Returns the step's metrics."""
    with given_back_if_refused(run):
        with run.timers.stage("pack"):
            batch = hand_over(run, groups)
        with run.timers.stage("score"):
            scored = score(run, batch, groups)
    run.is_intact = False
    with run.timers.stage("update"), at_step(run.step + 1):
        trace = UpdateTrace() if run.config.samples.enabled else None
        updates = update(run, scored, batch.engines, trace)
        run.histograms = gather_histograms(run, scored)
    run.step += 1
    if trace:
        with run.timers.stage("samples"):
            record_step(run, groups, trace)
    metrics = {**collected, **scored.metrics, **updates, **packing_metrics(batch.stats)}
    adapt_entropy_bonus(run, metrics)
    complete_step(run, metrics)
    return metrics


def end(run: TrainingRun) -> None:
    """Wait for evaluations beside training, and record the last step's timeline."""
    if run.config.evaluation.beside_training:
        settle_beside(run, wait=True)
    record_timeline(run, run.step)  # The checkpoint after the last step.


def open_records(run: TrainingRun, controller: Controller) -> None:
    """Open what the run's metrics, timeline and samples are written to."""
    if controller.writer is None:
        num_recorded = run.step + (run.unrecorded is None) if run.step else 0  # Step 0 included.
        controller.writer = open_writer(run.config, num_recorded, controller.preview)
        controller.timeline = open_timeline(run.config, num_recorded)
    if controller.recorder is None:
        controller.recorder = open_recorder(run.config, controller.tokenizer, run.step)


def stop_if_requested(run: TrainingRun) -> None:
    """Raise StopRequested on all ranks when one of them was asked to stop."""
    stop_together(run.stop_requested(), run.policy.processes.control)


def complete_step(run: TrainingRun, metrics: Metrics) -> None:
    """After an update: send weights to the engines, evaluate, record the step, export, save a checkpoint.

    Evaluations beside training end before the next one begins, and before the last checkpoint.
    """
    run.unrecorded, run.is_intact = metrics, True
    if run.step < run.config.num_steps:
        stop_if_requested(run)
    is_due = evaluation_is_due(run.config, run.step)
    if run.config.evaluation.beside_training:
        with run.timers.stage("evaluation"):
            settle_beside(run, wait=is_due)
    with run.timers.stage("weight_sync"):
        metrics.update(send_weights(run))
    if is_due:
        with run.timers.stage("evaluation"):
            metrics.update(evaluate(run))
    report(run, run.step, metrics)
    run.unrecorded = None
    if run.config.evaluation.beside_training and run.step >= run.config.num_steps:
        settle_beside(run, wait=True)
    run.is_intact = False
    with run.timers.stage("checkpoint"):
        saving(run).after_step(run.step)


def send_weights(run: TrainingRun) -> Metrics:
    """Send the weights to all engines. Collective."""
    with run.activity.span("weights", f"version {run.step}"):
        metrics = run.weight_sync.push(run.policy, run.step)
    if run.controller:
        run.fleet.call(run.controller.collector.weights_arrived)
    return metrics


def drive(run: TrainingRun, work: Callable[[Controller], T]) -> T | None:
    """Let rank 0 do work that needs the engines while the other ranks serve the fleet and get None.

    All ranks return together; an error on one rank is raised on all.
    """
    with raise_on_all_ranks(run.policy.processes.control):
        if run.controller is None:
            run.fleet.serve()
            return None
        try:
            return work(run.controller)
        finally:
            run.fleet.end_serving()


def collect(run: TrainingRun) -> tuple[Sequence[Group], Metrics]:
    """Rank 0 collects N groups while the other ranks serve the fleet; the other ranks get nothing."""

    def work(controller: Controller) -> tuple[Sequence[Group], Metrics]:
        collected = run.fleet.run(controller.collector.collect(run.step))
        run.fleet.sleep()
        return collected

    try:
        return drive(run, work) or ([], {})
    except StarvedError as starved:
        record_starved_step(run)
        if cause := find_starvation_cause(run):
            raise FleetError(cause) from starved
        raise


@contextmanager
def given_back_if_refused(run: TrainingRun) -> Iterator[None]:
    """If the step is refused before its first update, its prompts are asked again, by the run that continues."""
    try:
        yield
    except (FleetError, InputError):
        give_back(run)
        raise


def give_back(run: TrainingRun) -> None:
    """What was collected for the step is not learnt from: the run that continues asks its prompts again."""
    if run.config.data.sampling.needs_outcomes:
        run.is_intact = False  # The groups' outcomes have counted.
    elif run.controller:
        run.fleet.call(run.controller.collector.give_back)


def find_starvation_cause(run: TrainingRun) -> str | None:
    """Score the last responses: an error text if the engines cause the groups without a signal, else None."""
    policy, config = run.policy, run.config
    samples = None
    with raise_on_all_ranks(policy.processes.control):
        if run.controller:
            run.fleet.sleep()
            samples = samples_to_score(run.controller.collector.recent, run.step)
    has_any = torch.tensor(samples is not None)
    dist.broadcast(has_any, src=0, group=policy.processes.control)
    if not has_any:
        return None
    batch = policy.pack(
        samples,
        token_budget=config.batch.tokens_per_microbatch,
        aggregation=config.algorithm.aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    (micro_batches,) = batch.mini_batches
    metrics, engines = measure_scores(run, micro_batches, policy.score(micro_batches), batch.engines)
    return starvation_cause(metrics, config, engines)


def hand_over(run: TrainingRun, groups: Sequence[Group]) -> StepBatch:
    """Flatten the groups into samples with advantages on rank 0; then every rank gets and packs its micro-batches."""
    config = run.config
    return run.policy.pack(
        samples_of_groups(groups, config, run.step) if run.controller else None,
        token_budget=config.batch.tokens_per_microbatch,
        aggregation=config.algorithm.aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
        groups_per_update=config.batch.mini_batch_groups,
        whole_trajectories=needs_whole_trajectories(config),
    )


def packing_metrics(stats: PackingStats) -> Metrics:
    """How well the step's samples filled the ranks' micro-batches."""
    return {
        "batch/packing_efficiency": stats.packing_efficiency,
        "batch/budget_fill": stats.budget_fill,
        "batch/rank_imbalance": stats.rank_imbalance,
    }


def update(
    run: TrainingRun, scored: ScoredStep, engines: Sequence[str] = (), trace: UpdateTrace | None = None
) -> Metrics:
    """mu passes with one optimizer update per mini-batch, of the policy and of the critic if there is one; metrics are
    means over the updates. `engines[i]` is the URL of the step's engine i. `trace` gets what each update computed."""
    config = run.config
    settings = config.objective.model_copy(update={"entropy_coefficient": run.entropy.current()})
    objective = PolicyGradient(settings, run.policy.processes.context, run.counts.ratios if run.counts else None)
    if not config.scores_before_updates:
        scores: list[TokenScores] = []
        metrics = run.policy.update(scored.mini_batches[0], objective, scores=scores)
        batches = [batch.micro_batch for batch in scored.mini_batches[0]]
        if trace:
            trace.add_start(batches, [score.logprobs for score in scores])
            trace.updates.append(metrics)
        return {**check_scores(run, batches, scores, engines), **metrics}
    if trace:
        trace.add_scored(scored)
    totals: dict[str, float] = {}
    counts: Counter[str] = Counter()
    trains_policy = not config.uses_critic or run.step >= config.critic.pretraining_steps
    for epoch in range(config.batch.epochs):
        for i, mini_batch in enumerate(scored.mini_batches):
            # The first update starts from the weights that the tokens were scored with.
            own: list[TokenScores] | None = [] if trace and (epoch or i) else None
            metrics = run.policy.update(mini_batch, objective, scores=own, score_entropy=False) if trains_policy else {}
            if run.critic:
                metrics |= run.critic.update(scored.critic_batches[i], ValueLoss(config.critic.value_clip))
            if trace:
                trace.add_update(metrics, mini_batch, own or [])
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
                counts[name] += 1
    return {name: total / counts[name] for name, total in totals.items()}


def adapt_entropy_bonus(run: TrainingRun, metrics: Metrics) -> None:
    """Note the entropy bonus of the step's updates in its metrics, if it follows a target, and choose the next one."""
    if run.config.algorithm.entropy_target is not None:
        metrics["policy/entropy_coefficient"] = run.entropy.current()
    run.entropy.observe(metrics["policy/entropy"])


def gets_histograms(config: RunConfig, step: int) -> bool:
    every = config.tracking.histograms_every
    return bool(every and step % every == 0)


def gather_histograms(run: TrainingRun, scored: ScoredStep) -> dict[str, Histogram]:
    """The step's histograms, on rank 0 also those of its responses. Collective where the step gets any."""
    if run.counts is None:
        return {}
    counted = run.counts.histograms(scored.mini_batches, run.policy.processes)
    return {**counted, **run.controller.collector.histograms} if run.controller else counted


def evaluate(run: TrainingRun) -> Metrics:
    """Held-out metrics on rank 0; empty on the other ranks, and where the evaluation only begins, beside training."""
    if run.config.evaluation.beside_training:
        begin_beside(run)
        return {}

    def work(controller: Controller) -> Metrics:
        assert controller.evaluator
        metrics = run.fleet.run(controller.evaluator.run(run.fleet.generate))
        record_evaluation(run, run.step, controller.evaluator.pop_results())
        return metrics

    return drive(run, work) or {}


def report(run: TrainingRun, step: int, metrics: Metrics) -> None:
    """Record the step on rank 0, with the fleet's counters since the last record, evaluations included."""
    times = run.timers.summary()
    if run.controller:
        assert run.controller.writer
        metrics = {**metrics, **run.fleet.pop_metrics()}
        tokens = metrics.get("rollout/tokens", 0.0)
        if tokens and times.get("time/step_s"):
            times["rollout/end_to_end_tokens_per_s"] = tokens / times["time/step_s"]
        if "time/rollout_s" in times:
            times["time/waiting_share"] = times["time/rollout_s"] / times["time/step_s"]
        evaluator = run.controller.evaluator
        examples = evaluator.examples if evaluator and "evaluation/k" in metrics else ()
        run.controller.writer.write(step, {**metrics, **times}, run.histograms, examples)
        record_timeline(run, step)
        run.controller.progress.update(step, metrics)
        if "evaluation/reward_mean" in metrics:
            run.controller.progress.message(evaluation_line(step, metrics))


def record_timeline(run: TrainingRun, step: int) -> None:
    """Record on rank 0 what was done since the last record, as belonging to `step`."""
    if run.controller and run.controller.timeline:
        run.controller.timeline.write(run.activity.pop(step, run.fleet.pop_loads()))


def saving(run: TrainingRun) -> Saving:
    """What saves the run as it is."""
    return Saving(run.config, run.store, run.policy, partial(loop_state, run), run.critic)


def loop_state(run: TrainingRun) -> LoopState:
    controller = run.controller
    assert controller
    if controller.recorder:
        controller.recorder.flush()  # A run that continues from this state does not write them again.
    values, arrays = run.fleet.call(controller.collector.noted_state)()
    under_way = controller.beside.step if controller.beside else None
    own = {
        "dataset_fingerprint": controller.dataset_fingerprint,
        "unrecorded": run.unrecorded,
        "unrecorded_histograms": {name: asdict(h) for name, h in run.histograms.items()} if run.unrecorded else {},
        "entropy_control": run.entropy.state(),
        **({} if under_way is None else {EVALUATION_UNDER_WAY: under_way}),
    }
    return LoopState(run.step, {**values, **own}, arrays)


def restore(run: TrainingRun, state: LoopState) -> None:
    """Continue from a loaded checkpoint's loop state. Raises InputError, on all ranks, if the prompts have changed."""
    run.step = state.step
    run.unrecorded = state.values.get("unrecorded")
    histograms = state.values.get("unrecorded_histograms", {})
    run.histograms = {n: Histogram(h["low"], h["high"], tuple(h["counts"])) for n, h in histograms.items()}
    restore_entropy(run, state)
    with raise_on_all_ranks(run.policy.processes.control):
        if run.controller:
            refuse_other_data(state.values, run.controller.dataset_fingerprint, "training prompts")
            run.controller.interrupted = state.values.get(EVALUATION_UNDER_WAY)
            run.controller.collector.load_state(state.values, state.arrays)


def restore_entropy(run: TrainingRun, state: LoopState) -> None:
    """Continue the entropy bonus of a loaded checkpoint."""
    if "entropy_control" in state.values:  # Checkpoints of earlier versions lack it.
        run.entropy.load_state(state.values["entropy_control"])
