"""A trainer that dies under a process that lives on: the next one is brought to where the run is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.batching.step_advantages import step_advantages
from dapo_mega.config import RunConfig
from dapo_mega.errors import TrainerLost
from dapo_mega.training.build import TrainingRun
from dapo_mega.training.lifecycle import find_checkpoint
from dapo_mega.training.trainer import Measured, Trainer
from dapo_mega.types import Group

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metrics = dict[str, float]


def score_groups(
    trainer: Trainer, config: RunConfig, groups: Sequence[Group], step: int, *, counts: bool = False
) -> tuple[Measured | None, Metrics]:
    """See `Trainer.score`; where a KL penalty in the reward decides advantages within groups, they are computed
    here."""
    scores = trainer.score(step, counts=counts)
    if scores.penalties is not None:
        trainer.set_advantages(step_advantages(groups, config, scores.penalties))
    return scores.measured, scores.metrics


def with_trainer(run: TrainingRun, work: Callable[[], T]) -> T:
    """What the work returns. Where the trainer dies and this process lives on, the next trainer is brought to where the
    run is, and the work is done again. Raises TrainerLost where this one's engines have died with it, and FleetError
    where no trainer comes."""
    lost: TrainerLost | None = None
    while True:
        try:
            if lost and run.meet:
                logger.warning(
                    "%s; step %d waits for another trainer, and engines keep their requests", lost, run.step + 1
                )
                run.meet()
                bring_back(run)
            return work()
        except TrainerLost as error:
            if not run.meet:
                raise
            lost = error


def bring_back(run: TrainingRun) -> None:
    """Bring another trainer to where the run is: from the newest checkpoint it learns again what the run has learnt
    since."""
    if run.config.rollout.offload_trainer:
        run.fleet.sleep()  # An update that broke off has woken engines.
    run.trainer.build()
    run.trainer.saved_step = None
    newest = find_checkpoint(run.trainer)
    saved = run.trainer.load(newest).step if newest else 0
    for learnt in run.learnt:  # The same updates as when the run first learnt the step.
        if learnt.step > saved:
            run.trainer.take(samples_of_groups(learnt.groups, run.config, learnt.step - 1))
            score_groups(run.trainer, run.config, learnt.groups, learnt.step - 1)
            run.trainer.update(learnt.entropy_coefficient, traced=run.config.samples.enabled)
    run.weight_sync.reopen()
    run.trainer.begin()
    logger.warning("a trainer continues after step %d", run.step)
