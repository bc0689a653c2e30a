"""The buffer's groups as plain JSON values and arrays, and back: part of every checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dapo_mega.types import Group, Prompt, Response, ScoredResponse


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], dict[str, npt.NDArray[Any]]]:
    """JSON records, and arrays `buffer/token_ids`, `buffer/logprobs` of all responses one after the other."""
    records = [
        {
            "prompt": group.prompt.index,
            "weight_version": group.weight_version,
            "responses": [
                {
                    "request_id": scored.response.request_id,
                    "length": len(scored.response.token_ids),
                    "finish_reason": scored.response.finish_reason,
                    "weight_version": scored.response.weight_version,
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
    responses = [scored.response for group in groups for scored in group.responses]
    arrays = {
        "buffer/token_ids": np.concatenate([r.token_ids for r in responses] or [np.empty(0, np.int32)]),
        "buffer/logprobs": np.concatenate([r.logprobs for r in responses] or [np.empty(0, np.float32)]),
    }
    return records, arrays


def unpack_groups(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]], prompts: Sequence[Prompt]
) -> list[Group]:
    """The groups that `pack_groups` was given; `prompts` is the run's dataset."""
    groups = []
    start = 0
    for record in records:
        members = []
        for saved in record["responses"]:
            end = start + saved["length"]
            response = Response(
                request_id=saved["request_id"],
                token_ids=arrays["buffer/token_ids"][start:end],
                logprobs=arrays["buffer/logprobs"][start:end],
                finish_reason=saved["finish_reason"],
                weight_version=saved["weight_version"],
            )
            members.append(
                ScoredResponse(response, saved["text"], saved["correct"], saved["accuracy_reward"], saved["reward"])
            )
            start = end
        groups.append(Group(prompts[record["prompt"]], tuple(members), record["weight_version"]))
    return groups


def dataset_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Changes when any prompt, answer or their order changes: resuming on other data is refused."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.token_ids.tobytes())
        digest.update(b"\0" + prompt.ground_truth.encode() + b"\0")
    return digest.hexdigest()
