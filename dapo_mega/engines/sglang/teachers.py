"""Teachers on SGLang servers: they score the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dapo_mega.config import DistillationConfig
from dapo_mega.engines.sglang.api import MalformedAnswer, parse_prompt_logprobs, parse_prompt_top
from dapo_mega.errors import FleetError, InputError
from dapo_mega.rewards.endpoints import Endpoints, EndpointSettings, Unanswered
from dapo_mega.types import Group, LogProbs, Prompt, ScoredTrajectory, TokenIds

_Said = tuple[LogProbs, TokenIds, LogProbs]
"""Of the tokens behind a request's first: log-probs [n], and the most probable tokens with theirs, [n, k] each."""

_NUM_PROBED = 200
"""Of the policy's tokens, at equal distances, whose text a teacher must read as the policy does."""


class TeacherServers:
    """The teachers of a run that are servers. They are asked for what a step trains on, never for groups that are
    dropped, and what they say is kept with the trajectories: a step that is done again, or replayed, asks nobody."""

    def __init__(self, distillation: DistillationConfig, tokenizer: Any) -> None:
        """`tokenizer` is the policy's. Raises InputError for a teacher that does not answer or has other tokens."""
        self._distillation = distillation
        self._endpoints = {
            number: Endpoints(EndpointSettings.of(teacher), _read, "/generate")
            for number, teacher in enumerate(distillation.listed)
            if teacher.urls
        }
        for number in self._endpoints:
            self._check(number, tokenizer)

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with what their teachers say. Raises FleetError where a teacher did not answer."""
        found: dict[int, _Said] = {}
        top_k = self._distillation.top_k
        for number in self._endpoints:
            of_teacher = (g for g in groups if self._distillation.number_of(g.prompt.data_source) == number)
            asked = [
                (member, piece)
                for group in of_teacher
                for member in group.trajectories
                if not len(member.teacher_logprobs) or len(member.teacher_top_ids) != top_k * member.num_rows
                for piece in _pieces(group.prompt, member)
            ]
            bodies = [_body(tokens, first - 1, top_k) for _, (tokens, first, _) in asked]
            answers = self._without_gaps(number, self._endpoints[number].post_all(bodies))
            for (member, (*_, rows)), answer in zip(asked, answers, strict=True):
                for values, own in zip(
                    found.setdefault(member.id, _nothing(member.num_rows, top_k)), answer, strict=True
                ):
                    values[rows] = own
                    values[~member.sampled] = 0
        return [
            replace(
                group,
                trajectories=tuple(
                    _with(member, *found[member.id]) if member.id in found else member for member in group.trajectories
                ),
            )
            for group in groups
        ]

    def _without_gaps(self, number: int, answers: Sequence[_Said | Unanswered]) -> list[_Said]:
        gaps = [answer.reason for answer in answers if isinstance(answer, Unanswered)]
        if gaps:
            raise FleetError(
                f"{self._name(number)} did not score {len(gaps)} of {len(answers)} sequences of the step: {gaps[0]}; "
                f"when it serves again, the same command continues the run"
            )
        return [answer for answer in answers if not isinstance(answer, Unanswered)]

    def _name(self, number: int) -> str:
        """A teacher by its key in the configuration."""
        config = self._distillation
        names = (name for name, teacher in config.teachers.items() if config.listed.index(teacher) == number)
        return f"distillation.teachers.{next(names)}"

    def _check(self, number: int, tokenizer: Any) -> None:
        ids = sorted(tokenizer.get_vocab().values())
        text = tokenizer.decode(ids[:: max(1, len(ids) // _NUM_PROBED)])
        own = tokenizer(text)["input_ids"]
        (answer,) = self._endpoints[number].post_all([{**_body(np.array(own), 0), "text": text, "input_ids": None}])
        if isinstance(answer, Unanswered):
            raise InputError(f"{self._name(number)} cannot be asked: {answer.reason}")
        if answer != own:
            i = next(
                (i for i, (a, b) in enumerate(zip(own, answer, strict=False)) if a != b), min(len(own), len(answer))
            )
            raise InputError(
                f"{self._name(number)} has another tokenizer than the policy: it reads a text of {len(own)} tokens as "
                f"{len(answer)}, and from token {i} on as {answer[i : i + 3]} where the policy has {own[i : i + 3]} "
                f"({tokenizer.decode(own[i : i + 3])!r}); give a teacher with the policy's tokens"
            )


def _nothing(num_rows: int, top_k: int) -> _Said:
    shape = (num_rows, top_k)
    return np.zeros(num_rows, np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)


def _with(member: ScoredTrajectory, logprobs: LogProbs, ids: TokenIds, top: LogProbs) -> ScoredTrajectory:
    return replace(member, teacher_logprobs=logprobs, teacher_top_ids=ids.ravel(), teacher_top_logprobs=top.ravel())


def _pieces(prompt: Prompt, member: ScoredTrajectory) -> Iterator[tuple[TokenIds, int, slice]]:
    """The sequences of a trajectory that have sampled tokens: all their tokens, the place there of the first sampled
    one, and the trajectory's rows from it on."""
    for start, stop, has_prompt in member.pieces:
        sampled = np.flatnonzero(member.sampled[start:stop])
        if len(sampled):
            before = prompt.token_ids if has_prompt else prompt.token_ids[:0]
            tokens = np.concatenate([before, member.token_ids[start:stop]])
            yield tokens, len(before) + int(sampled[0]), slice(start + int(sampled[0]), stop)


def _body(token_ids: TokenIds, start: int, top_k: int = 0) -> dict[str, Any]:
    """Of a call that scores the tokens behind the one at `start`, and says the `top_k` most probable ones in place of
    each; SGLang's cache may have those before it."""
    return {
        "input_ids": token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start,
        **({"top_logprobs_num": top_k} if top_k else {}),
    }


def _read(request: Mapping[str, Any], answer: Any) -> Any:
    """What is said of the tokens behind `logprob_start_len`; of a text the ids of its tokens. Raises ValueError for an
    answer that does not fit."""
    try:
        if request["input_ids"] is None:
            return [token_id for _, token_id, *_ in answer["meta_info"]["input_token_logprobs"]]
        tokens = np.array(request["input_ids"][request["logprob_start_len"] :])
        top = parse_prompt_top(answer, len(tokens) - 1, request.get("top_logprobs_num", 0))
        return parse_prompt_logprobs(answer, tokens), *top
    except MalformedAnswer as error:
        raise ValueError(f"the answer cannot be used: {error}") from None
    except (LookupError, TypeError):
        raise ValueError(f"the answer has no log-probs of its prompt: {str(answer)[:200]}") from None
