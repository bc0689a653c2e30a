"""Converts the buffer's groups to JSON values and arrays for checkpoints, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy.typing as npt

from dapo_mega import trajectory_records
from dapo_mega.config import RunConfig
from dapo_mega.config.base import flat, may_change_at_resume
from dapo_mega.trajectory_records import Arrays, Record, pack_trajectories, unpack_trajectories
from dapo_mega.types import Group, Prompt, SamplingParams


def pack_groups(groups: Sequence[Group], name: str) -> tuple[list[Record], Arrays]:
    """JSON records, and the arrays `name/...` of all trajectories, concatenated."""
    packed, arrays = pack_trajectories([member for group in groups for member in group.members], name)
    records = iter(packed)
    return [
        {
            "prompt": group.prompt.index,
            "weight_version": group.weight_version,
            **({"last_is_greedy": True} if group.greedy else {}),
            "responses": [next(records) for _ in group.members],
        }
        for group in groups
    ], arrays


def unpack_groups(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]], prompts: Sequence[Prompt], name: str
) -> list[Group]:
    """The inverse of `pack_groups`; `prompts` is the run's dataset."""
    saved = [member for record in records for member in record["responses"]]
    trajectories = iter(unpack_trajectories(saved, arrays, name, trajectory_records.SCORED))
    groups = []
    for record in records:
        members = [next(trajectories) for _ in record["responses"]]
        greedy = members.pop() if record.get("last_is_greedy") else None
        groups.append(Group(prompts[record["prompt"]], tuple(members), greedy))
    return groups


def settings_of_groups(config: RunConfig, sampling: SamplingParams) -> Record:
    """The settings that responses are sampled with (`sampling.`) and scored with (`reward.`), by name."""
    sampled = {**asdict(sampling), "stop_token_ids": list(sampling.stop_token_ids), "stop": list(sampling.stop)}
    del sampled["num_tokens"]  # It follows from the model, which may not change.
    scored = flat(config.reward.model_dump(mode="json"), "reward.")
    if config.environment.kind != "single_turn":
        scored |= flat(config.environment.model_dump(mode="json"), "environment.")
    return {
        **flat(sampled, "sampling."),
        "sampling.has_greedy": config.algorithm.advantage.has_greedy,
        "sampling.routing_replay": config.rollout.routing_replay,
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
