"""Held-out evaluation during a run."""

from pydantic import Field

from dapo_mega.config.base import Section
from dapo_mega.config.rollout import RolloutConfig


class EvaluationConfig(Section):
    """Held-out evaluation through the same engine: avg@k, pass@k, maj@k."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations on data.evaluation. 0: only at_start and at_end."""
    at_start: bool = False
    """Evaluate before the first step: the score to compare with."""
    at_end: bool = False
    """Evaluate after the last step."""
    samples_per_prompt: int = Field(default=32, ge=1)
    """Responses per problem: the k of avg@k, pass@k and maj@k. Small data sets need more for a steady score."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of evaluation. 0: greedy, and one response per problem whatever samples_per_prompt says, as
    all would be equal."""
    top_p: float = Field(default=0.7, gt=0, le=1)
    """Sample from the likeliest tokens that hold this share of the probability. 1: from all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens. 0: from all."""
    beside_training: bool = False
    """Evaluate while training goes on, by engines that keep the evaluated step's weights until its evaluation ends; the
    result is recorded at that step when it is there. Needs rollout.placement=fleet, and engines beyond
    rollout.fleet.min_engines."""
    engines: int = Field(default=1, ge=1)
    """With beside_training: engines that an evaluation takes away from training while it lasts."""
    limit_s: float = Field(default=3600.0, gt=0)
    """With beside_training: seconds after which an evaluation ends; responses that are unfinished then are counted, and
    the evaluation has no score. The next evaluation, and the end of the run, wait for it no longer than that."""

    @property
    def responses_per_prompt(self) -> int:
        """The k of avg@k: 1 if the evaluation is greedy."""
        return self.samples_per_prompt if self.temperature > 0 else 1


def check_beside_training(evaluation: EvaluationConfig, rollout: RolloutConfig) -> None:
    """Raises ValueError where no engine can be kept for evaluations beside training."""
    if not evaluation.beside_training:
        return
    if rollout.placement != "fleet":
        raise ValueError(
            f"evaluation.beside_training=true keeps engines of a fleet for evaluations, and rollout.placement="
            f"{rollout.placement} has none to spare; set rollout.placement=fleet, or evaluation.beside_training=false"
        )
    fleet = rollout.fleet
    if fleet.urls and not fleet.rendezvous and len(fleet.urls) < fleet.min_engines + evaluation.engines:
        raise ValueError(
            f"evaluation.beside_training=true needs rollout.fleet.min_engines={fleet.min_engines} engines for training "
            f"and evaluation.engines={evaluation.engines} for evaluations, but rollout.fleet.urls names "
            f"{len(fleet.urls)}; start more, or lower one of the two"
        )
