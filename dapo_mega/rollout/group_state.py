"""Converts responses and the buffer's groups to JSON values and arrays for checkpoints, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo_mega.config import RunConfig
from dapo_mega.config.base import flat, may_change_at_resume
from dapo_mega.types import Group, Prompt, Response, SamplingParams, ScoredResponse

Record = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


def pack_groups(groups: Sequence[Group], name: str) -> tuple[list[Record], Arrays]:
    """JSON records, and the arrays `name/token_ids` and `name/logprobs` of all responses, concatenated."""
    packed, arrays = pack_responses([scored.response for group in groups for scored in _members(group)], name)
    responses = iter(packed)
    records = [
        {
            "prompt": group.prompt.index,
            "weight_version": group.weight_version,
            **({"last_is_greedy": True} if group.greedy else {}),
            "responses": [
                {
                    **next(responses),
                    "text": scored.text,
                    "correct": scored.correct,
                    "accuracy_reward": scored.accuracy_reward,
                    "reward": scored.reward,
                    "answer": scored.answer,
                    "parts": dict(scored.parts),
                }
                for scored in _members(group)
            ],
        }
        for group in groups
    ]
    return records, arrays


def unpack_groups(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]], prompts: Sequence[Prompt], name: str
) -> list[Group]:
    """The inverse of `pack_groups`; `prompts` is the run's dataset."""
    responses = iter(unpack_responses([saved for record in records for saved in record["responses"]], arrays, name))
    groups = []
    for record in records:
        members = [_unpack_scored(saved, next(responses)) for saved in record["responses"]]
        greedy = members.pop() if record.get("last_is_greedy") else None
        groups.append(Group(prompts[record["prompt"]], tuple(members), record["weight_version"], greedy))
    return groups


def _unpack_scored(saved: Mapping[str, Any], response: Response) -> ScoredResponse:
    """Older checkpoints lack `answer` and `parts`."""
    return ScoredResponse(
        response,
        saved["text"],
        saved["correct"],
        saved["accuracy_reward"],
        saved["reward"],
        saved.get("answer"),
        saved.get("parts", {}),
    )


def _members(group: Group) -> tuple[ScoredResponse, ...]:
    """The responses, the greedy one last."""
    return (*group.responses, group.greedy) if group.greedy else group.responses


def pack_responses(responses: Sequence[Response], name: str) -> tuple[list[Record], Arrays]:
    """One JSON record per response, and the arrays `name/token_ids` and `name/logprobs` of all, concatenated."""
    records = [
        {
            "request_id": response.request_id,
            "length": len(response.token_ids),
            "finish_reason": response.finish_reason,
            "weight_version": response.weight_version,
            "version_spans": response.version_spans,
            "engine_spans": response.engine_spans,
        }
        for response in responses
    ]
    arrays = {
        f"{name}/token_ids": np.concatenate([r.token_ids for r in responses] or [np.empty(0, np.int32)]),
        f"{name}/logprobs": np.concatenate([r.logprobs for r in responses] or [np.empty(0, np.float32)]),
    }
    return records, arrays


def unpack_responses(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]], name: str
) -> list[Response]:
    """The inverse of `pack_responses`. Older checkpoints may lack `version_spans` or `engine_spans`."""
    ends = np.cumsum([saved["length"] for saved in records], dtype=np.int64).tolist()
    return [
        Response(
            request_id=saved["request_id"],
            token_ids=arrays[f"{name}/token_ids"][end - saved["length"] : end],
            logprobs=arrays[f"{name}/logprobs"][end - saved["length"] : end],
            finish_reason=saved["finish_reason"],
            weight_version=saved["weight_version"],
            version_spans=tuple((version, stop) for version, stop in saved.get("version_spans", ())),
            engine_spans=tuple((url, stop) for url, stop in saved.get("engine_spans", ())),
        )
        for saved, end in zip(records, ends, strict=True)
    ]


def settings_of_groups(config: RunConfig, sampling: SamplingParams) -> Record:
    """The settings that responses are sampled with (`sampling.`) and scored with (`reward.`), by name."""
    sampled = {**asdict(sampling), "stop_token_ids": list(sampling.stop_token_ids)}
    scored = flat(config.reward.model_dump(mode="json"), "reward.")
    return {
        **flat(sampled, "sampling."),
        "sampling.has_greedy": config.algorithm.advantage == "greedy_baseline",
        **{name: value for name, value in scored.items() if not may_change_at_resume(RunConfig, name)},
    }


def dataset_fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of all prompts and answers, and difficulties if there are any, in order; a resumed run must have the
    same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.token_ids.tobytes())
        digest.update(b"\0" + prompt.ground_truth.encode() + b"\0")
        if prompt.difficulty is not None:
            digest.update(f"{prompt.difficulty!r}\0".encode())
    return digest.hexdigest()
