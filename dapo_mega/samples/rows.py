"""The rows of a file: one response each, with all that is known about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dapo_mega.types import Group, GroupFate, GroupOutcome, Prompt, Response, ScoredResponse

Floats = npt.NDArray[np.float32]
Kind = Literal["training", "evaluation"]

OUTCOMES_KEPT = ("trained", "surplus")
FORMAT = 1
"""The version of the files' format."""


@dataclass(frozen=True, eq=False)
class Training:
    """What training knows about one response beside its score. `sample` is its number within the step.

    Each column is [L]: `trainer_logprobs` under the weights that the step starts from, `update_logprobs` in the last
    update that the response took part in (None if that was the first), `advantages` (None if all of them are
    `advantage`).
    """

    sample: int
    advantage: float
    in_loss: bool
    trainer_logprobs: Floats
    update_logprobs: Floats | None = None
    advantages: Floats | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """One response. `scored` is None for a response of a group that was given up; `outcome` and `kept` are None in
    evaluations. `group` is the smallest request id of the group."""

    group: int
    prompt: Prompt
    response: Response
    scored: ScoredResponse | None
    outcome: GroupOutcome | None = None
    is_greedy: bool = False
    training: Training | None = None

    @property
    def is_kept(self) -> bool | None:
        return None if self.outcome is None else self.outcome in OUTCOMES_KEPT


@dataclass(frozen=True, eq=False)
class SampleFile:
    """The content of one file: its rows, and `account`, JSON values that describe the whole step."""

    step: int
    kind: Kind
    rows: Sequence[Row]
    account: Mapping[str, Any] = field(default_factory=dict)


def rows_of_group(group: Group, outcome: GroupOutcome | None = None) -> Iterator[Row]:
    """The responses of a group, the greedy one last, without what training knows."""
    first = min(scored.response.request_id for scored in group.responses)
    for scored in group.responses:
        yield Row(first, group.prompt, scored.response, scored, outcome)
    if group.greedy:
        yield Row(first, group.prompt, group.greedy.response, group.greedy, outcome, is_greedy=True)


def rows_of_evaluation(results: Sequence[tuple[Prompt, Response, ScoredResponse | None]]) -> list[Row]:
    """The responses of an evaluation, which come in the order of requests; None for one that could not be scored."""
    first: dict[int, int] = {}
    for prompt, response, _ in results:
        first.setdefault(prompt.index, response.request_id)
    return [Row(first[prompt.index], prompt, response, scored) for prompt, response, scored in results]


def rows_of(fate: GroupFate) -> Iterator[Row]:
    """The responses of a training group, also of one that was given up."""
    if fate.group:
        yield from rows_of_group(fate.group, fate.outcome)
    first = min((response.request_id for response in fate.unscored), default=0)
    for response in fate.unscored:
        yield Row(first, fate.prompt, response, None, fate.outcome)
