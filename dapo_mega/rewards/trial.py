"""Tries a reward on one record before a run begins, so that a mistake is one line and not a lost hour."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_mega.errors import InputError
from dapo_mega.rewards.composed import ComposedReward
from dapo_mega.rewards.records import RewardRecord, ScoringFailure

_NUM_TOKENS = 16


def made_up_record(
    problem: str, messages: Sequence[Mapping[str, str]], ground_truth: str, data_source: str, fields: Mapping[str, Any]
) -> RewardRecord:
    """A record of a real row with a made-up response, which gives the right answer in two of the usual ways."""
    return RewardRecord(
        prompt=problem,
        messages=tuple(messages),
        response=f"This response was made up to try the reward. \\boxed{{{ground_truth}}}\nAnswer: {ground_truth}",
        token_ids=np.arange(_NUM_TOKENS, dtype=np.int32),
        finish_reason="stop",
        ground_truth=ground_truth,
        data_source=data_source,
        fields=fields,
        request_id=0,
    )


def try_reward(reward: ComposedReward, record: RewardRecord, *, needs_correctness: str = "") -> list[str]:
    """Score one record; one line per component that says what came out.

    Raises InputError where a component fails, or where none says whether the response is correct although the text
    `needs_correctness` says what to do then.
    """
    lines = []
    for component in reward.components:
        (score,) = component.reward.score([record])
        if isinstance(score, ScoringFailure):
            raise InputError(f"the reward was tried on one record and failed: {component.name}: {score.reason}")
        judged = "" if score.correct is None else f", correct={score.correct}"
        parts = "".join(f", {name}={value:g}" for name, value in score.parts.items())
        lines.append(f"{component.name} (weight {component.weight:g}): {score.value + 0.0:g}{judged}{parts}")
        if component.name == reward.deciding and score.correct is None and needs_correctness:
            raise InputError(
                f"the reward was tried on one record, and {component.name} did not say whether it is correct; "
                f"{needs_correctness}"
            )
    return lines
