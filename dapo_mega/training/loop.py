"""The loop: roll out, filter, pack, update, sync. `train` reads like Algorithm 1 of the paper."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dapo_mega.batching.handover import HandoverGroups, broadcast_columns, broadcast_names
from dapo_mega.batching.packing import MicroBatch, columns_from_samples
from dapo_mega.batching.step import (
    StepBatch,
    engines_of,
    hand_over_step,
    samples_of_groups,
    stale_tokens,
    unweighted_sample,
)
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.checkpoints.store import LoopState
from dapo_mega.config import RunConfig
from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.errors import FleetError, InputError, StarvedError, StopRequested
from dapo_mega.megatron.megatron_policy import TokenScores
from dapo_mega.megatron.mismatch import measure_engines, measure_mismatch, mismatch_warning, starvation_cause
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.metrics import MetricAccumulator
from dapo_mega.training.build import Pipeline, open_writer
from dapo_mega.types import Group, Prompt, Response

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
Scored = tuple[Sequence[MicroBatch], Sequence[TokenScores], Sequence[str]]
"""Micro-batches, their scores, and the URLs of engines by number."""


def train(pipeline: Pipeline) -> None:
    """Run the remaining steps. The weights at step s have version s; version 0 starts the run.

    Raises StopRequested, on all processes, when the run was asked to stop: between steps, while responses are generated
    or when a step's update is done. `loop_state` is then what the run continues from.
    """
    config = pipeline.config
    with raise_on_all_ranks(pipeline.policy.processes.control):
        if pipeline.driver and pipeline.driver.writer is None:
            num_recorded = pipeline.step + (pipeline.unrecorded is None)  # Step 0 included.
            pipeline.driver.writer = open_writer(config, num_recorded if pipeline.step else 0)
    if pipeline.unrecorded is not None:
        complete_step(pipeline, pipeline.unrecorded)
    else:
        pipeline.weight_sync.push(pipeline.policy, pipeline.step)
        if pipeline.step == 0 and config.evaluation.at_start:
            report(pipeline, 0, evaluate(pipeline))
    while pipeline.step < config.num_steps:
        stop_if_requested(pipeline)
        with pipeline.timers.stage("rollout"):
            groups, collected = collect(pipeline)
        with pipeline.timers.stage("pack"):
            batch = hand_over(pipeline, groups)
        with pipeline.timers.stage("score"):
            mini_batches, mismatch = attach_old_logprobs(pipeline, batch)
            if not batch.has_fresh and config.rollout.placement != "colocated":  # Those engines sleep by now.
                mismatch = {**probe_agreement(pipeline, groups), **mismatch}
        with pipeline.timers.stage("update"):
            updates = update(pipeline, mini_batches, batch.engines)
        pipeline.step += 1
        complete_step(pipeline, {**collected, **mismatch, **updates, **packing_metrics(batch)})


def stop_if_requested(pipeline: Pipeline) -> None:
    """Raise StopRequested, on all processes, when one of them was asked to stop."""
    requested = torch.tensor([float(pipeline.stop_requested())])
    dist.all_reduce(requested, op=dist.ReduceOp.MAX, group=pipeline.policy.processes.control)
    if requested.item():
        raise StopRequested("the run was asked to stop")


def complete_step(pipeline: Pipeline, metrics: Metrics) -> None:
    """What follows an update: weights to the engines, held-out evaluation, the step's record, exports, checkpoint."""
    pipeline.unrecorded = metrics
    if pipeline.step < pipeline.config.num_steps:
        stop_if_requested(pipeline)
    with pipeline.timers.stage("weight_sync"):
        metrics.update(pipeline.weight_sync.push(pipeline.policy, pipeline.step))
    if evaluation_is_due(pipeline.config, pipeline.step):
        with pipeline.timers.stage("evaluation"):
            metrics.update(evaluate(pipeline))
    report(pipeline, pipeline.step, metrics)
    pipeline.unrecorded = None
    with pipeline.timers.stage("checkpoint"):
        export_and_save(pipeline)


def collect(pipeline: Pipeline) -> tuple[Sequence[Group], Metrics]:
    """Rank 0 collects N groups while the other replicas' engines work for it; others get nothing."""
    groups: Sequence[Group] = []
    metrics: Metrics = {}
    try:
        with raise_on_all_ranks(pipeline.policy.processes.control):
            if pipeline.driver:
                try:
                    groups, metrics = pipeline.driver.collector.collect(pipeline.step)
                    pipeline.fleet.sleep()
                finally:
                    pipeline.fleet.release()
            else:
                pipeline.fleet.serve()
    except StarvedError as starved:
        if cause := find_starvation_cause(pipeline):
            raise FleetError(cause) from starved
        raise
    return groups, metrics


def find_starvation_cause(pipeline: Pipeline) -> str | None:
    """Why the engines are to blame for groups without a signal, by the last responses; None where they are not."""
    recent: list[tuple[Prompt, Response]] = []
    with raise_on_all_ranks(pipeline.policy.processes.control):
        if pipeline.driver:
            pipeline.fleet.sleep()
            for prompt, response in pipeline.driver.collector.recent:
                if stale_tokens(response, pipeline.step) < len(response.token_ids):
                    recent.append((prompt, response))
    if scored := _score_responses(pipeline, recent):
        metrics, engines = measure_scores(pipeline, *scored)
        return starvation_cause(metrics, pipeline.config, engines)
    return None


def hand_over(pipeline: Pipeline, groups: Sequence[Group]) -> StepBatch:
    """Advantages and flat columns on rank 0, then every process packs its own micro-batches."""
    policy = pipeline.policy
    columns = None
    engines: tuple[str, ...] = ()
    if pipeline.driver:
        engines = engines_of(scored.response for group in groups for scored in group.responses)
        columns = columns_from_samples(samples_of_groups(groups, pipeline.config, pipeline.step, engines))
    processes = policy.processes
    return hand_over_step(
        columns,
        pipeline.config,
        policy.packing_layout,
        data_rank=processes.data_rank,
        groups=HandoverGroups(processes.control, processes.leaders, processes.replica),
        engines=engines,
    )


def packing_metrics(batch: StepBatch) -> Metrics:
    """How well the step's samples filled the ranks' micro-batches; see `StepPlan`."""
    return {
        "batch/packing_efficiency": batch.packing_efficiency,
        "batch/budget_fill": batch.budget_fill,
        "batch/rank_imbalance": batch.rank_imbalance,
    }


def attach_old_logprobs(pipeline: Pipeline, batch: StepBatch) -> tuple[list[list[TokenBatch]], Metrics]:
    """pi_old <- pi_theta: score every response token with the weights the step starts from.

    Also measures how far the engine's log-probs are from them, which raises FleetError on all processes when it is over
    `rollout.mismatch_stop`. A step of a single update needs no pass of its own for this: the update itself starts from
    those weights, and raises before its checkpoint is written.
    """
    everything = [pipeline.policy.share(micro) for mini_batch in batch.mini_batches for micro in mini_batch]
    references = pipeline.reference.score(everything) if pipeline.reference else [None] * len(everything)
    scores: Sequence[TokenScores | None] = [None] * len(everything)
    metrics: Metrics = {}
    if pipeline.config.batch.updates_per_step > 1:
        own = pipeline.policy.score(everything)
        metrics, scores = _check_scores(pipeline, everything, own, batch.engines), own
    token_batches = iter(
        TokenBatch(micro_batch, score.logprobs if score else None, reference.logprobs if reference else None)
        for micro_batch, score, reference in zip(everything, scores, references, strict=True)
    )
    return [[next(token_batches) for _ in mini_batch] for mini_batch in batch.mini_batches], metrics


def probe_agreement(pipeline: Pipeline, groups: Sequence[Group]) -> Metrics:
    """Engine against trainer on one response sampled for this purpose: for steps that train on surplus alone, which
    brings no response of the current weights. `groups` are the step's; the collector gets them back, on rank 0, when
    the run is to stop."""
    probed: list[tuple[Prompt, Response]] = []
    with raise_on_all_ranks(pipeline.policy.processes.control):
        if pipeline.driver:
            collector = pipeline.driver.collector
            try:
                answers = collector.probe(pipeline.step)
            except StopRequested:
                collector.undo(groups)
                raise
            finally:
                pipeline.fleet.release()
            if not answers:
                raise StarvedError("the engine did not answer a probe of its weights; see its log and start again")
            probed = [(collector.prompts[0], answers[0])]
        else:
            pipeline.fleet.serve()
    scored = _score_responses(pipeline, probed)
    assert scored
    return _check_scores(pipeline, *scored)


def _score_responses(pipeline: Pipeline, responses: Sequence[tuple[Prompt, Response]]) -> Scored | None:
    """Score the responses that rank 0 gives, on all processes; None where it gives none."""
    policy, config = pipeline.policy, pipeline.config
    control = policy.processes.control
    names = engines_of(response for _, response in responses)
    columns = None
    if pipeline.driver and responses:
        samples = [unweighted_sample(prompt, response, pipeline.step, names) for prompt, response in responses]
        columns = columns_from_samples(samples)
    has_any = torch.tensor(len(responses))
    dist.broadcast(has_any, src=0, group=control)
    if not has_any:
        return None
    columns = broadcast_columns(columns, control)
    batches = policy.pack(
        columns,
        token_budget=config.batch.tokens_per_microbatch,
        aggregation=config.algorithm.aggregation,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return batches, policy.score(batches), broadcast_names(names, control)


def _check_scores(
    pipeline: Pipeline, batches: Sequence[MicroBatch], scores: Sequence[TokenScores], engines: Sequence[str]
) -> Metrics:
    """`measure_scores`. Warns of a mismatch, and raises FleetError, on all processes, for one over
    `rollout.mismatch_stop`."""
    metrics, by_engine = measure_scores(pipeline, batches, scores, engines)
    message = mismatch_warning(metrics, pipeline.config, pipeline.step + 1, by_engine)
    if message and pipeline.driver:
        logger.warning(message)
    return metrics


def measure_scores(
    pipeline: Pipeline, batches: Sequence[MicroBatch], scores: Sequence[TokenScores], engines: Sequence[str]
) -> tuple[Metrics, Metrics]:
    """Mismatch and entropy of scored micro-batches, and the mean mismatch by engine; `engines` are URLs by number."""
    processes = pipeline.policy.processes
    is_counted = processes.is_last_stage and processes.tensor_rank == 0
    counted = list(zip(batches, scores, strict=True)) if is_counted else []
    entropy = torch.zeros(2, dtype=torch.float64)
    for _, score in counted:
        entropy += torch.stack([score.entropy.double().sum().cpu(), torch.tensor(float(len(score.entropy)))])
    dist.all_reduce(entropy, group=processes.control)
    scored = [(micro_batch, score.logprobs) for micro_batch, score in counted]
    metrics = measure_mismatch(
        scored, pipeline.config.objective, control=processes.control, context_group=processes.context
    )
    by_engine = measure_engines(scored, engines, control=processes.control) if engines else {}
    return {"policy/entropy": float(entropy[0] / entropy[1]), **metrics}, by_engine


def update(pipeline: Pipeline, mini_batches: Sequence[Sequence[TokenBatch]], engines: Sequence[str] = ()) -> Metrics:
    """mu passes of one optimizer update per mini-batch; metrics are means over the updates. `engines` are those of the
    step, by number."""
    objective = PolicyGradient(pipeline.config.objective, pipeline.policy.processes.context)
    if pipeline.config.batch.updates_per_step == 1:
        metrics, scores = pipeline.policy.update_and_score(mini_batches[0], objective)
        batches = [batch.micro_batch for batch in mini_batches[0]]
        return {**_check_scores(pipeline, batches, scores, engines), **metrics}
    means = MetricAccumulator()
    for _ in range(pipeline.config.batch.epochs):
        for mini_batch in mini_batches:
            for name, value in pipeline.policy.update(mini_batch, objective).items():
                means.add(name, value)
    return means.summary()


def evaluation_is_due(config: RunConfig, step: int) -> bool:
    every = config.evaluation.every
    return bool(every and step % every == 0) or (config.evaluation.at_end and step == config.num_steps)


def checkpoint_is_due(config: RunConfig, step: int) -> bool:
    every = config.checkpoint.every
    return bool(every and step % every == 0) or step == config.num_steps


def export_is_due(config: RunConfig, step: int) -> bool:
    every = config.checkpoint.hf_every
    return bool(every and step % every == 0)


def evaluate(pipeline: Pipeline) -> Metrics:
    """Held-out metrics on rank 0; nothing on the others."""
    metrics: Metrics = {}
    with raise_on_all_ranks(pipeline.policy.processes.control):
        if pipeline.driver:
            assert pipeline.driver.evaluator
            try:
                metrics = pipeline.driver.evaluator.run(pipeline.fleet)
            finally:
                pipeline.fleet.release()
        else:
            pipeline.fleet.serve()
    return metrics


def report(pipeline: Pipeline, step: int, metrics: Metrics) -> None:
    """Record the step on rank 0, with all that the fleet has counted since the last record, evaluations included."""
    times = pipeline.timers.summary()
    if pipeline.driver:
        assert pipeline.driver.writer
        metrics = {**metrics, **pipeline.fleet.pop_metrics()}
        tokens = metrics.get("rollout/tokens", 0.0)
        if tokens and times.get("time/step_s"):
            times["rollout/end_to_end_tokens_per_s"] = tokens / times["time/step_s"]
        pipeline.driver.writer.write(step, {**metrics, **times})
        pipeline.driver.progress.update(step, metrics)
        if "evaluation/avg_at_k" in metrics:
            pipeline.driver.progress.message(_evaluation_line(step, metrics))


def _evaluation_line(step: int, metrics: Metrics) -> str:
    k = int(metrics["evaluation/k"])
    values = {
        f"avg@{k}": "avg_at_k",
        f"pass@{k}": "pass_at_k",
        f"maj@{k}": "maj_at_k",
        "length": "response_length_mean",
    }
    text = "  ".join(f"{label}={metrics[f'evaluation/{name}']:.3f}" for label, name in values.items())
    return f"held-out evaluation after step {step}: {text}"


def export_and_save(pipeline: Pipeline) -> None:
    """Complete the checkpoint in writing if its files are there, and write what is due after this step.

    The export comes first: a run that resumes after this step has it. Everything that decides the next step goes into
    the checkpoint.
    """
    policy, config, step = pipeline.policy, pipeline.config, pipeline.step
    pipeline.store.finish(policy, wait=False)
    if export_is_due(config, step):
        save_hf_checkpoint(policy, Path(config.output_dir) / f"hf_step_{step:08d}")
    if checkpoint_is_due(config, step):
        pipeline.store.save(policy, lambda: loop_state(pipeline), step)


def loop_state(pipeline: Pipeline) -> LoopState:
    driver = pipeline.driver
    assert driver
    values, arrays = driver.collector.state()
    own = {"dataset_fingerprint": driver.dataset_fingerprint, "unrecorded": pipeline.unrecorded}
    return LoopState(pipeline.step, {**values, **own}, arrays)


def restore(pipeline: Pipeline, state: LoopState) -> None:
    """Continue from a loaded checkpoint's loop state. Raises InputError, on all processes, for other data."""
    pipeline.step = state.step
    pipeline.unrecorded = state.values.get("unrecorded")
    with raise_on_all_ranks(pipeline.policy.processes.control):
        _restore_driver(pipeline, state)


def _restore_driver(pipeline: Pipeline, state: LoopState) -> None:
    if pipeline.driver:
        if state.values["dataset_fingerprint"] != pipeline.driver.dataset_fingerprint:
            raise InputError(
                "the checkpoint was made with other training prompts than data.train gives now; resume with the same "
                "data, or start a new run in another output_dir"
            )
        pipeline.driver.collector.load_state(state.values, state.arrays)
