"""Evaluations beside training: reserved engines answer while the steps go on, and a thread scores.

The result of step s is of the weights of version s alone. Weight updates do not wait for an evaluation, so its engines
are left out of them until it ends (`RolloutFleet.reserved`); a response that other weights had a part in is
refused where it arrives. Training waits for an evaluation in two places only, and there at most until
`evaluation.limit_s` after the evaluation's start, and for its scoring: before the next evaluation begins, as there is
one at a time, and after the last step.

The result is recorded when it is there, as belonging to step s. A checkpoint names the evaluation that was under way.
A run that continues from it begins the evaluation again if the checkpoint has the weights of step s, takes the result
that is in `metrics.jsonl` already, or else records that the evaluation is lost: these weights are no longer anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dapo_mega.config import EvaluationConfig
from dapo_mega.distributed.event_loops import beside
from dapo_mega.engines.protocol import RolloutFleet
from dapo_mega.evaluation.evaluator import EvaluatedResponse, Evaluator
from dapo_mega.metrics import Example, read_metrics
from dapo_mega.metrics.timeline import Activity
from dapo_mega.rollout.asking import Rollout
from dapo_mega.types import GenerationFailure

logger = logging.getLogger(__name__)

_POLL_S = 0.2


@dataclass(frozen=True)
class FinishedEvaluation:
    """What came of the evaluation of the weights after `step`."""

    step: int
    metrics: dict[str, float]
    responses: Sequence[EvaluatedResponse]
    examples: Sequence[Example]


class BesideTraining:
    """Rank 0's evaluations beside training, one at a time. `step` is that of the evaluation under way, from its start
    until its result is recorded."""

    def __init__(
        self, evaluator: Evaluator, config: EvaluationConfig, check_stop: Callable[[], None], activity: Activity
    ) -> None:
        """`evaluator` must have a reward of its own, as it scores in a thread. `check_stop` is called during waits and
        may raise StopRequested. `activity` notes what is done when."""
        self.step: int | None = None
        self._evaluator = evaluator
        self._config = config
        self._check_stop = check_stop
        self._activity = activity
        self._future: Future[FinishedEvaluation] | None = None

    def start(self, fleet: RolloutFleet, step: int, *, is_last: bool) -> None:
        """Begin to evaluate the weights of version `step`, which the engines have just been given. After the last step
        by all engines."""
        assert self.step is None
        self._future = fleet.start(self._evaluate(fleet, step, None if is_last else self._config.engines))
        self.step = step

    def result(self, *, wait: bool) -> FinishedEvaluation | None:
        """What came of the evaluation under way; None if there is none or, without `wait`, if it has not ended.

        Raises InputError as `ResponseScorer` does. Call `recorded` afterwards.
        """
        if self._future is None:
            return None
        while wait and not self._future.done():
            self._check_stop()
            with contextlib.suppress(TimeoutError):
                self._future.exception(_POLL_S)
        return self._future.result() if self._future.done() else None

    def recorded(self) -> None:
        """Note that the result is on disk: another evaluation may begin."""
        self.step = self._future = None

    def close(self) -> None:
        if self._future:
            self._future.cancel()

    async def _evaluate(self, fleet: RolloutFleet, step: int, num_engines: int | None) -> FinishedEvaluation:
        started = time.monotonic()
        with self._activity.span("evaluation", f"generation for step {step}"):
            async with fleet.reserved(version=step, num_engines=num_engines, limit_s=self._config.limit_s) as engines:
                rollouts = await self._evaluator.roll_out(engines.generate)
        metrics = {
            "evaluation/engines": float(engines.num_engines),
            "evaluation/generation_s": time.monotonic() - started,
        }
        with self._activity.span("evaluation", f"scoring for step {step}"):
            return await beside(partial(self._evaluated, step, rollouts, engines.ended_early, metrics))

    def _evaluated(
        self, step: int, rollouts: Sequence[Rollout], ended_early: str, metrics: dict[str, float]
    ) -> FinishedEvaluation:
        """`metrics` are those of the generation, which `ended_early` for this reason, if for any."""
        metrics |= self._evaluator.measure(rollouts)
        reasons = [rollout.reason for rollout in rollouts if isinstance(rollout, GenerationFailure)]
        failures = [reason for reason in reasons if reason != ended_early]
        num_unfinished = len(reasons) - len(failures)
        metrics["evaluation/unfinished"] = float(num_unfinished)
        if num_unfinished:
            logger.warning(
                "the evaluation of step %d ended early (%s): %d of %d responses are missing, so it has no score",
                step,
                ended_early,
                num_unfinished,
                len(rollouts),
            )
        if failures:
            logger.warning(
                "%d responses of the evaluation of step %d could not be generated, so it has no score; the first: %s",
                len(failures),
                step,
                failures[0],
            )
        return FinishedEvaluation(step, metrics, self._evaluator.pop_results(), self._evaluator.examples)


LOST = {"evaluation/lost": 1.0}
"""What is recorded of an evaluation that was under way when the run ended, and whose weights are gone."""


def is_recorded(output_dir: str, step: int, what: str = "evaluation/") -> bool:
    """Whether `metrics.jsonl` has metrics of a step whose names begin so; a damaged one, which the next start mends,
    has none."""
    path = Path(output_dir) / "metrics.jsonl"
    try:
        records = read_metrics(path) if path.is_file() else []
    except (OSError, ValueError):
        records = []
    return any(record["step"] == step and any(name.startswith(what) for name in record) for record in records)
