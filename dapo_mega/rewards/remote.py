"""A reward that a server of the user's own computes, asked over HTTP in batches.

Request, POST: `{"records": [{"prompt", "messages", "response", "token_ids", "finish_reason", "ground_truth",
"data_source", "fields", "opened_thought"}, ...]}`. Answer: `{"scores": [...]}` with one entry per record, in order: a
number, or `{"score": number, "correct": bool or null, "parts": {name: number}, "answer": text or null}`, or
`{"error": text}` for a record that could not be scored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dapo_mega.rewards.endpoints import Endpoints, EndpointSettings, Unanswered, one_line
from dapo_mega.rewards.records import LARGEST, Reward, RewardRecord, Score, ScoringFailure, plain_record
from dapo_mega.types import METRIC_PART

_MAX_PARTS = 100


class RemoteReward(Reward):
    """Asks servers for scores. What cannot be had from any of them within the limits is a failure with its reason."""

    def __init__(self, endpoints: EndpointSettings, batch_size: int) -> None:
        """`batch_size` records travel in one request. Raises InputError for a bad URL or key."""
        self._batch_size = batch_size
        self._endpoints = Endpoints(endpoints, _read_scores)

    def score(self, records: Sequence[RewardRecord]) -> list[Score | ScoringFailure]:
        size = self._batch_size
        batches = [records[start : start + size] for start in range(0, len(records), size)]
        answers = self._endpoints.post_all(
            [{"records": [plain_record(record) for record in batch]} for batch in batches]
        )
        results: list[Score | ScoringFailure] = []
        for batch, answer in zip(batches, answers, strict=True):
            results += [ScoringFailure(answer.reason)] * len(batch) if isinstance(answer, Unanswered) else answer
        return results


def _read_scores(request: Mapping[str, Any], answer: Any) -> list[Score | ScoringFailure]:
    """One result per record of the request. Raises ValueError for an answer that does not fit it."""
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise ValueError(f'the answer is not {{"scores": [...]}}: {answer!r}')
    wanted, given = len(request["records"]), len(answer["scores"])
    if given != wanted:
        raise ValueError(f"{given} scores for {wanted} records")
    results = []
    for number, score in enumerate(answer["scores"]):
        try:
            results.append(_result(score))
        except ValueError as error:
            raise ValueError(f"score {number}: {error}") from None
    return results


def _result(given: Any) -> Score | ScoringFailure:
    """One entry of an answer. Raises ValueError."""
    if not isinstance(given, dict):
        return Score(_number(given, "a score"))
    if given.get("error"):
        return ScoringFailure(one_line(f"the server says: {given['error']}"))
    if unknown := sorted(map(str, given.keys() - {"score", "correct", "parts", "answer", "error"})):
        raise ValueError(f"unknown keys {unknown}; known are score, correct, parts, answer, error")
    correct, answer, parts = given.get("correct"), given.get("answer"), given.get("parts") or {}
    if correct is not None and not isinstance(correct, bool):
        raise ValueError(f"correct is {correct!r}; give true, false or null")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"answer is {answer!r}; give text or null")
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS:
        raise ValueError(f"parts is {parts!r}; give at most {_MAX_PARTS} named numbers")
    if unusable := [name for name in parts if not METRIC_PART.fullmatch(name)]:
        raise ValueError(f"a part is called {unusable[0]!r}; names have letters, digits and any of '_.@-' only")
    numbers = {name: _number(value, f"part {name!r}") for name, value in parts.items()}
    return Score(_number(given.get("score"), "score"), correct, numbers, answer)


def _number(value: Any, what: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return float(value)
    raise ValueError(f"{what} is {repr(value)[:80]}; give a finite number, of {LARGEST:g} at most")
