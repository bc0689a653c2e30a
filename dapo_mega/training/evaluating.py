"""When a run evaluates, and how it begins, records and takes up evaluations beside training."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dapo_mega.config import RunConfig
from dapo_mega.training.build import TrainingRun
from dapo_mega.training.evaluation_beside import LOST, is_recorded
from dapo_mega.training.recording import record_evaluation

logger = logging.getLogger(__name__)


def evaluation_is_due(config: RunConfig, step: int) -> bool:
    """Whether the weights after this step, from 1 on, are evaluated."""
    every = config.evaluation.every
    return bool(every and step % every == 0) or (config.evaluation.at_end and step == config.num_steps)


def begin_beside(run: TrainingRun) -> None:
    """Begin to evaluate the weights that the engines have just been given."""
    if run.beside:
        run.beside.start(run.fleet, run.step, is_last=run.step >= run.config.num_steps)


def settle_beside(run: TrainingRun, *, wait: bool) -> None:
    """Record the result of the evaluation under way if it is there; with `wait`, wait for it.

    Raises StopRequested when the run is to stop while it waits.
    """
    if run.beside and (finished := run.beside.result(wait=wait)):
        assert run.writer
        record_evaluation(run, finished.step, finished.responses)
        run.writer.add(finished.step, finished.metrics, finished.examples)
        run.beside.recorded()
        run.progress.message(evaluation_line(finished.step, finished.metrics))


def take_up_interrupted(run: TrainingRun) -> bool:
    """Account for the evaluation that was under way when the loaded checkpoint was written; the records are open.
    Returns whether it is to begin again, as the engines will get the same weights."""
    step, run.interrupted = run.interrupted, None
    if step is None or is_recorded(run.config.output_dir, step):
        return False
    if run.beside and step == run.step and run.unrecorded is None:
        return True
    assert run.writer
    logger.warning(
        "the evaluation of step %d was under way when the run ended, and is lost: the checkpoint of step %d does not "
        "have its weights",
        step,
        run.step,
    )
    run.writer.add(step, LOST)
    return False


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """A held-out evaluation in one line, for the console."""
    k = int(metrics["evaluation/k"])
    values = {
        f"avg@{k}": "avg_at_k",
        f"pass@{k}": "pass_at_k",
        f"maj@{k}": "maj_at_k",
        "reward": "reward_mean",
        "length": "response_length_mean",
    }
    recorded = {label: metrics.get(f"evaluation/{name}") for label, name in values.items()}
    text = "  ".join(f"{label}={value:.3f}" for label, value in recorded.items() if value is not None)
    if unscored := int(metrics["evaluation/unscored"]):
        text += f"  without {unscored} responses that could not be scored"
    missing = int(metrics["evaluation/failed"])
    return f"held-out evaluation after step {step}: {f'no score, {missing} responses are missing' if missing else text}"
