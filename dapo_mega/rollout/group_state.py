"""Responses and the buffer's groups as plain JSON values and arrays, and back: part of every checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo_mega.types import Group, Prompt, Response, ScoredResponse

Record = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


def pack_groups(groups: Sequence[Group]) -> tuple[list[Record], Arrays]:
    """JSON records, and arrays `buffer/token_ids`, `buffer/logprobs` of all responses one after the other."""
    packed, arrays = pack_responses([scored.response for group in groups for scored in group.responses], "buffer")
    responses = iter(packed)
    records = [
        {
            "prompt": group.prompt.index,
            "weight_version": group.weight_version,
            "responses": [
                {
                    **next(responses),
                    "text": scored.text,
                    "correct": scored.correct,
                    "accuracy_reward": scored.accuracy_reward,
                    "reward": scored.reward,
                }
                for scored in group.responses
            ],
        }
        for group in groups
    ]
    return records, arrays


def unpack_groups(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]], prompts: Sequence[Prompt]
) -> list[Group]:
    """The groups that `pack_groups` was given; `prompts` is the run's dataset."""
    responses = iter(unpack_responses([saved for record in records for saved in record["responses"]], arrays, "buffer"))
    return [
        Group(
            prompts[record["prompt"]],
            tuple(
                ScoredResponse(
                    next(responses), saved["text"], saved["correct"], saved["accuracy_reward"], saved["reward"]
                )
                for saved in record["responses"]
            ),
            record["weight_version"],
        )
        for record in records
    ]


def pack_responses(responses: Sequence[Response], name: str) -> tuple[list[Record], Arrays]:
    """A JSON record per response, and arrays `name/token_ids`, `name/logprobs` of all one after the other."""
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
    """The responses that `pack_responses` was given. Checkpoints of earlier versions have no `version_spans`, or no
    `engine_spans`."""
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


def dataset_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Changes when any prompt, answer or their order changes: resuming on other data is refused."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.token_ids.tobytes())
        digest.update(b"\0" + prompt.ground_truth.encode() + b"\0")
    return digest.hexdigest()
