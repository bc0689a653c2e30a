"""The training loop: roll out, filter, pack, update, sync. `train` follows Algorithm 1 of the paper.

It is plain code of the process that commands, which is rank 0. What all processes do together are methods of
`run.trainer`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dapo_mega.algorithms.entropy_control import EntropyControl
from dapo_mega.batching.plan import PackingStats
from dapo_mega.batching.samples import samples_of_groups, samples_to_score
from dapo_mega.checkpoints.folders import step_of
from dapo_mega.checkpoints.store import EVALUATION_UNDER_WAY, LoopState
from dapo_mega.config import RunConfig
from dapo_mega.errors import FleetError, InputError, StarvedError, TrainerLost, at_step
from dapo_mega.megatron.mismatch import mismatch_warning, starvation_cause
from dapo_mega.metrics import Histogram
from dapo_mega.metrics.timeline.file import TimelineWriter
from dapo_mega.training.build import Learnt, TrainingRun
from dapo_mega.training.evaluating import (
    begin_beside,
    evaluation_is_due,
    evaluation_line,
    settle_beside,
    take_up_interrupted,
)
from dapo_mega.training.lifecycle import Saving, refuse_other_data
from dapo_mega.training.recording import open_recorder, record_evaluation, record_starved_step, record_step
from dapo_mega.training.recovery import score_groups, with_trainer
from dapo_mega.training.run_records import open_writer
from dapo_mega.training.trainer import Measured, Updated
from dapo_mega.types import Group

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


def train(run: TrainingRun) -> None:
    """Run the remaining steps. The weights at step s have version s; version 0 starts the run.

    Raises StopRequested when the run was asked to stop: between steps, while responses are generated or after a step's
    update. The run then continues from `loop_state`.
    """
    begin(run)
    while run.step < run.config.num_steps:
        learn(run, *collect_step(run))  # No name: the groups are gone before the next ones come.
    end(run)


def begin(run: TrainingRun) -> None:
    """Open the records, send the weights to the engines, and evaluate where that is due before a step."""
    config = run.config
    run.fleet.update_outdated = partial(send_weights_to_outdated, run)
    open_records(run)
    is_interrupted = take_up_interrupted(run)
    if run.unrecorded is not None:
        complete_step(run, run.unrecorded)
    else:
        send_weights(run)
        if run.step == 0 and config.evaluation.at_start:
            report(run, 0, evaluate(run))
        elif is_interrupted:
            begin_beside(run)


def collect_step(run: TrainingRun) -> tuple[Sequence[Group], Metrics]:
    """The next step's groups, and the metrics of what was generated."""
    run.is_intact = True
    run.check_stop()
    with run.timers.stage("rollout"):
        return collect(run)


def learn(run: TrainingRun, groups: Sequence[Group], collected: Metrics) -> Metrics:
    """Score the groups, update the models, and complete the step. Returns the step's metrics."""
    every = run.config.tracking.histograms_every
    counts = bool(every and (run.step + 1) % every == 0)
    coefficient = run.entropy.current()
    groups = ask_teachers(run, groups)

    def attempt() -> tuple[PackingStats, Metrics, Updated]:
        run.is_intact = True
        try:
            with run.timers.stage("pack"):
                stats = run.trainer.take(samples_of_groups(groups, run.config, run.step))
            with run.timers.stage("score"):
                measured, scored = score_groups(run.trainer, run.config, groups, run.step, counts=counts)
                scored |= check_mismatch(run, measured)
        except (FleetError, InputError):
            give_back(run)  # It is refused before its first update: the run that continues asks its prompts again.
            raise
        run.is_intact = False
        with run.timers.stage("update"):
            return stats, scored, update(run, coefficient)

    stats, scored, updated = with_trainer(run, attempt)
    run.histograms = {**updated.histograms, **run.collector.histograms} if counts else {}
    run.step += 1
    if run.meet:
        run.learnt.append(Learnt(run.step, groups, coefficient))
    if run.recorder:
        with run.timers.stage("samples"):
            record_step(run, groups, updated.updates)
    metrics = {
        **collected,
        **scored,
        **updated.metrics,
        "batch/packing_efficiency": stats.packing_efficiency,
        "batch/budget_fill": stats.budget_fill,
        "batch/rank_imbalance": stats.rank_imbalance,
    }
    adapt_entropy_bonus(run.entropy, run.config, metrics)
    complete_step(run, metrics)
    return metrics


def ask_teachers(run: TrainingRun, groups: Sequence[Group]) -> Sequence[Group]:
    """The groups, with the log-probs of teachers on servers. Raises FleetError where one does not answer; the run that
    continues asks the prompts again."""
    if run.teachers is None:
        return groups
    try:
        with run.timers.stage("teacher"):
            return run.teachers.scored(groups)
    except FleetError:
        give_back(run)
        raise


def end(run: TrainingRun) -> None:
    """Wait for evaluations beside training, and record the last step's timeline."""
    settle_beside(run, wait=True)
    record_timeline(run, run.step)  # The checkpoint after the last step.


def open_records(run: TrainingRun) -> None:
    """Open what the run's metrics, timeline and samples are written to."""
    if run.writer is None:
        num_recorded = run.step + (run.unrecorded is None) if run.step else 0  # Step 0 included.
        run.writer = open_writer(run.config, num_recorded, run.preview)
        run.timeline = TimelineWriter(Path(run.config.output_dir), num_recorded, is_on=run.config.tracking.timeline)
    if run.recorder is None:
        run.recorder = open_recorder(run.config, run.tokenizer, run.step)


def complete_step(run: TrainingRun, metrics: Metrics) -> None:
    """After an update: send weights to the engines, evaluate, record the step, export, save a checkpoint.

    Evaluations beside training end before the next one begins, and before the last checkpoint. Where engines have the
    trainer's memory afterwards, exports and checkpoints come first; who continues from such a one does the rest again.
    """
    run.unrecorded, run.is_intact = metrics, True
    if run.step < run.config.num_steps:
        run.check_stop()
    lends_memory = run.config.rollout.offload_trainer
    if lends_memory and run.trainer.saved_step != run.step:
        save(run)
        run.is_intact = True
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
    if run.step >= run.config.num_steps:
        settle_beside(run, wait=True)
    if not lends_memory:
        save(run)


def save(run: TrainingRun) -> None:
    """Export and save what is due after the step."""
    run.is_intact = False
    with run.timers.stage("checkpoint"):
        with_trainer(run, lambda: saving(run).after_step(run.step))
    if run.learnt and (newest := run.trainer.store.latest()):  # What is in a complete one need not be learnt again.
        run.learnt = [learnt for learnt in run.learnt if learnt.step > step_of(newest)]


def send_weights(run: TrainingRun) -> Metrics:
    """Send the weights to all engines."""
    with run.activity.span("weights", f"version {run.step}"):
        metrics = with_trainer(run, lambda: run.weight_sync.push(run.step))
    run.fleet.call(run.collector.weights_arrived)
    return metrics


def send_weights_to_outdated(run: TrainingRun) -> None:
    """Send the weights to engines that have joined or come back, while the others generate."""
    if run.config.rollout.offload_trainer and run.fleet.is_serving():
        return  # There is no room for the weights beside engines that generate.
    with run.activity.span("weights", f"version {run.step}, to engines that joined"):
        with_trainer(run, lambda: run.weight_sync.push_to_outdated(run.step))


def collect(run: TrainingRun) -> tuple[Sequence[Group], Metrics]:
    """The N groups of a step; engines on the trainer's GPUs sleep afterwards."""
    try:
        collected = run.fleet.run(run.collector.collect(run.step))
        take_turn(run)
        return collected
    except StarvedError as starved:
        record_starved_step(run)
        if cause := find_starvation_cause(run):
            raise FleetError(cause) from starved
        raise


def take_turn(run: TrainingRun) -> None:
    """Engines on the trainer's GPUs sleep, and the trainer has its memory, until weights are sent."""
    run.fleet.sleep()
    if run.config.rollout.offload_trainer:
        with_trainer(run, lambda: run.trainer.hold("all"))


def lend_memory(run: TrainingRun) -> None:
    """Engines on the trainer's GPUs, which wake when the run ends, have its memory from now on."""
    if run.config.rollout.offload_trainer:
        with contextlib.suppress(TrainerLost):  # Its memory is free then, too.
            run.trainer.hold("nothing")


def give_back(run: TrainingRun) -> None:
    """What was collected for the step is not learnt from: the run that continues asks its prompts again."""
    if run.config.data.sampling.needs_outcomes:
        run.is_intact = False  # The groups' outcomes have counted.
    else:
        run.fleet.call(run.collector.give_back)


def find_starvation_cause(run: TrainingRun) -> str | None:
    """Score the last responses: an error text if the engines cause the groups without a signal, else None."""
    take_turn(run)
    samples = samples_to_score(run.collector.recent, run.step)
    if samples is None:
        return None

    def measure() -> Measured:
        run.trainer.take(samples, in_mini_batches=False)
        return run.trainer.measure()

    measured = with_trainer(run, measure)
    note_measured(run, measured)
    return starvation_cause(measured.metrics, run.config, measured.by_engine)


def check_mismatch(run: TrainingRun, measured: Measured | None) -> Metrics:
    """The metrics; warns of a mismatch, and raises FleetError if it is over `rollout.mismatch_stop`."""
    if measured is None:
        return {}
    note_measured(run, measured)
    if message := mismatch_warning(measured.metrics, run.config, run.step + 1, measured.by_engine):
        logger.warning(message)
    return measured.metrics


def note_measured(run: TrainingRun, measured: Measured) -> None:
    if any(map(math.isnan, measured.metrics.values())):
        run.is_intact = False  # As the weights may not be numbers.


def update(run: TrainingRun, entropy_coefficient: float) -> Updated:
    """mu passes with one optimizer update per mini-batch. A step with a single update is checked after it, as that
    scores the tokens."""
    with at_step(run.step + 1):
        updated = run.trainer.update(entropy_coefficient, traced=run.config.samples.enabled)
    check_mismatch(run, updated.measured)
    return updated


def adapt_entropy_bonus(entropy: EntropyControl, config: RunConfig, metrics: Metrics) -> None:
    """Note the entropy bonus of the step's updates in its metrics, if it follows a target, and choose the next one."""
    if config.algorithm.entropy_target is not None:
        metrics["policy/entropy_coefficient"] = entropy.current()
    entropy.observe(metrics["policy/entropy"])


def evaluate(run: TrainingRun) -> Metrics:
    """Held-out metrics; empty where the evaluation only begins, beside training."""
    if run.config.evaluation.beside_training:
        begin_beside(run)
        return {}
    assert run.evaluator
    metrics = run.fleet.run(run.evaluator.run(run.fleet.generate))
    record_evaluation(run, run.step, run.evaluator.pop_results())
    return metrics


def report(run: TrainingRun, step: int, metrics: Metrics) -> None:
    """Record the step, with the fleet's counters since the last record, evaluations included."""
    assert run.writer
    times = run.timers.summary()
    metrics = {**metrics, **run.fleet.pop_metrics()}
    tokens = metrics.get("rollout/tokens", 0.0)
    if tokens and times.get("time/step_s"):
        times["rollout/end_to_end_tokens_per_s"] = tokens / times["time/step_s"]
    if "time/rollout_s" in times:
        times["time/waiting_share"] = times["time/rollout_s"] / times["time/step_s"]
    examples = run.evaluator.examples if run.evaluator and "evaluation/k" in metrics else ()
    run.writer.write(step, {**metrics, **times}, run.histograms, examples)
    record_timeline(run, step)
    run.progress.update(step, metrics)
    if "evaluation/reward_mean" in metrics:
        run.progress.message(evaluation_line(step, metrics))


def record_timeline(run: TrainingRun, step: int) -> None:
    """Record what was done since the last record, as belonging to `step`."""
    if run.timeline:
        run.timeline.write(run.activity.pop(step, run.fleet.pop_loads()))


def saving(run: TrainingRun) -> Saving:
    """What saves the run as it is."""
    if run.config.rollout.offload_trainer:
        take_turn(run)
    return Saving(run.config, run.trainer, partial(loop_state, run))


def loop_state(run: TrainingRun) -> LoopState:
    if run.recorder:
        run.recorder.flush()  # A run that continues from this state does not write them again.
    values, arrays = run.fleet.call(run.collector.noted_state)()
    under_way = run.beside.step if run.beside else None
    own: dict[str, Any] = {
        "dataset_fingerprint": run.dataset_fingerprint,
        "unrecorded": run.unrecorded,
        "unrecorded_histograms": {name: asdict(h) for name, h in run.histograms.items()} if run.unrecorded else {},
        "entropy_control": run.entropy.state(),
        **({} if under_way is None else {EVALUATION_UNDER_WAY: under_way}),
    }
    return LoopState(run.step, {**values, **own}, arrays)


def restore(run: TrainingRun, state: LoopState) -> None:
    """Continue from a loaded checkpoint's loop state. Raises InputError if the prompts have changed."""
    run.step = state.step
    run.unrecorded = state.values.get("unrecorded")
    histograms = state.values.get("unrecorded_histograms", {})
    run.histograms = {n: Histogram(h["low"], h["high"], tuple(h["counts"])) for n, h in histograms.items()}
    restore_entropy(run.entropy, state)
    refuse_other_data(state.values, run.dataset_fingerprint, "training prompts")
    run.interrupted = state.values.get(EVALUATION_UNDER_WAY)
    run.collector.load_state(state.values, state.arrays)


def restore_entropy(entropy: EntropyControl, state: LoopState) -> None:
    """Continue the entropy bonus of a loaded checkpoint."""
    if "entropy_control" in state.values:  # Checkpoints of earlier versions lack it.
        entropy.load_state(state.values["entropy_control"])
