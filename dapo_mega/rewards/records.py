"""What a reward is given for one response, and what it returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from dapo_mega.types import TokenIds

LARGEST: Final = 1e30
"""Squares and sums of larger numbers overflow where rewards become advantages."""


@dataclass(frozen=True, eq=False)
class RewardRecord:
    """One response with everything that may decide its reward.

    `prompt` is the problem's text and `messages` what the model was shown, as {role, content}. `token_ids` [L] are
    those of the response. `fields` are the other columns of the dataset's row. `request_id` is unique within a run.
    `opened_thought` is the tag, such as `<think>`, of a thought that the end of the prompt has opened; the response
    begins in it. `turns` have what an environment gave in each turn: reward, correct (1 or 0) and parts by name.
    """

    prompt: str
    messages: tuple[Mapping[str, str], ...]
    response: str
    token_ids: TokenIds
    finish_reason: str
    ground_truth: str
    data_source: str = ""
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    request_id: int = -1
    opened_thought: str = ""
    turns: tuple[Mapping[str, float], ...] = ()

    @property
    def whole_response(self) -> str:
        """The response with the tag of the thought that the prompt has opened for it."""
        return self.opened_thought + self.response


@dataclass(frozen=True)
class Score:
    """The value of one response to one reward.

    `correct` is None where the reward does not judge that. `parts` are named numbers to log beside the value, `answer`
    is the answer that it read, if any, and `outcome` says how a judgement ended (see `Verdict`); empty without one.
    """

    value: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    answer: str | None = None
    outcome: str = ""


@dataclass(frozen=True)
class ScoringFailure:
    """A response that a reward could not score: it raised, hung, died or was not reached. Never a number.

    `reason` is one line, `detail` more lines for whoever looks for the cause, such as a traceback.
    """

    reason: str
    detail: str = ""


def plain_record(record: RewardRecord) -> dict[str, Any]:
    """A record as a user's function or server gets it, except that `token_ids` is still an array."""
    plain = {name: value for name, value in vars(record).items() if name not in ("request_id", "turns")}
    return {**plain, "messages": [dict(message) for message in record.messages], "fields": dict(record.fields)}


class Reward(Protocol):
    """One reward: `score` returns one result per record, in order.

    `score` raises InputError for what trying again cannot mend, such as a function that returns too few scores.
    """

    def score(self, records: Sequence[RewardRecord]) -> list[Score | ScoringFailure]: ...

    def close(self) -> None:
        """End what it started, by default nothing. May be called again."""
        return
