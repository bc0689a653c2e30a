"""Describes every metric that a run records: unit, meaning, healthy values, warning signs and what to do."""

from collections.abc import Mapping

from dapo_mega.declared import Metric
from dapo_mega.metrics.catalogue.engines_and_time import ENGINES_AND_TIME
from dapo_mega.metrics.catalogue.evaluations import EVALUATIONS
from dapo_mega.metrics.catalogue.groups_and_rewards import GROUPS_AND_REWARDS
from dapo_mega.metrics.catalogue.rollouts import ROLLOUTS
from dapo_mega.metrics.catalogue.updates import UPDATES

__all__ = ["CATALOGUE", "PREFIXES", "Metric", "describe"]

PREFIXES: Mapping[str, str] = {
    "evaluation": "In the records of steps with a held-out evaluation. The model answers each prompt "
    "`evaluation.samples_per_prompt` (k) times. Responses that no engine could generate are left out. "
    "With `evaluation.beside_training` they are recorded later than the rest of the step.",
    "rollout": "What the engines generated, and how well they agree with the trainer. Means are over all responses "
    "that were scored in this step, also those of groups that the filter then drops. They are missing from a step that "
    "needed no new responses. `requests_*` and `failed_calls*` exist with SGLang engines only; they count since the "
    "last record, evaluations included but those beside training.",
    "environment": "How trajectories with an `environment` fared since the step before; evaluations are not counted.",
    "source": "The same for each source of prompts: a value of the column `columns.data_source`, or the name of a "
    "dataset of `data.mixture` where a row has none or several datasets have the same. Recorded if the run's prompts "
    "have several sources. The 31 sources with the most prompts have names of their own, `others` has the rest, `none` "
    "the rows without one.",
    "sampling": "Which prompts are asked. <name> is `train`, or the name of a dataset of `data.mixture`. Recorded with "
    "`data.mixture`, and with `data.sampling` other than plain shuffling.",
    "groups": "How the dynamic-sampling filter judged the groups that were completed in this step. A group is all "
    "responses to one prompt.",
    "buffer": "Groups that passed the filter and wait for a step. Staleness is the number of steps "
    "since the oldest token of a group was sampled.",
    "reward": "The parts of the reward, and responses of this step whose judgement ended in an unusual way. Those that "
    "a verification could not settle count as wrong. Those that could not be scored are left out of all means, and "
    "their groups are dropped.",
    "mismatch": "Compares the engines' log-probs with the trainer's over all response tokens that the step trains on, "
    "also those sampled from older weights. A token's importance weight is the trainer's probability, with the weights "
    "that the step starts from, over the engine's probability at sampling.",
    "policy": "The policy update. Unless stated otherwise a value is the mean over the step's optimizer updates, and "
    "each update's value is a mean over the tokens that count in its loss. What an update has no token for is left out "
    "of the step's mean. Supervised training records `loss`, `grad_norm`, `learning_rate`, `empty_update_share`, "
    "`skipped_update_share`, `tokens_per_s`, the router losses and `time/step_s`.",
    "critic": "The update of the value model. Only with `algorithm.advantage=gae`. Means are as those of `policy`.",
    "batch": "How well the step's samples fill the micro-batches.",
    "time": "Wall-clock seconds of rank 0. A stage includes waiting for other processes. The stages of a record add "
    "up to nearly `time/step_s`; `group_latency_*` are of groups and no stages.",
    "weight_sync": "The update of the SGLang engines after the step. Missing with embedded engines.",
    "fleet": "The SGLang engines. Counts are since the last record; states are those at the moment of the record. "
    "Missing with embedded engines.",
}
"""What the metrics of each prefix have in common, in the order in which they are documented."""

CATALOGUE: tuple[Metric, ...] = (*EVALUATIONS, *ROLLOUTS, *GROUPS_AND_REWARDS, *UPDATES, *ENGINES_AND_TIME)
"""All metrics, in the order in which they are documented."""


def describe(name: str) -> Metric | None:
    """The entry of a recorded metric; None if there is none."""
    return next((metric for metric in CATALOGUE if metric.describes(name)), None)
