"""A group while it is rolled out: a coroutine over its trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_mega.engines.protocol import Generation
from dapo_mega.environments.base import Begun, Environment, Generate, Progress, TrajectoryFailure
from dapo_mega.trajectory_records import Arrays, Record, pack_trajectories, unpack_trajectories
from dapo_mega.types import GenerationRequest, Group, GroupFate, Prompt, Trajectory


@dataclass(eq=False)
class OpenGroup:
    """A group from its first request until a step counts it. `trajectories` are those that are complete, by request id,
    `progress` how far others are, and `failed` has those whose environment failed.

    `result` is what it came to: the group with scored trajectories, or the fate of one whose request failed or that
    could not be scored. `task` rolls it out, `is_kept` says whether it counts as one that a step can use."""

    prompt: Prompt
    requests: tuple[GenerationRequest, ...]
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    result: Group | GroupFate | None = None
    is_kept: bool = True
    task: asyncio.Task[None] | None = None
    failed: list[Trajectory] = field(default_factory=list)

    @property
    def id(self) -> int:
        """The id of its first request."""
        return self.requests[0].request_id

    @property
    def is_complete(self) -> bool:
        """Whether all trajectories are there."""
        return len(self.trajectories) == len(self.requests)

    @property
    def unscored(self) -> tuple[Trajectory, ...]:
        """What there is of it where it is given up."""
        return (*self.trajectories.values(), *self.failed)

    def copy(self) -> OpenGroup:
        """It as it is now, without what rolls it out."""
        progress = {number: Progress(each.begun) for number, each in self.progress.items() if each.begun}
        return OpenGroup(self.prompt, self.requests, dict(self.trajectories), progress)

    def members(self) -> tuple[Trajectory, ...]:
        """All trajectories, in the order of the requests."""
        return tuple(self.trajectories[request.request_id] for request in self.requests)

    async def roll_out(self, environment: Environment, generate: Generate) -> None:
        """Complete it. Raises GenerationFailure when a request fails, after giving up the others."""

        async def trajectory(request: GenerationRequest) -> None:
            progress = self.progress.setdefault(request.request_id, Progress())
            try:
                found = await environment.run(self.prompt, request, generate, progress)
            except TrajectoryFailure as failure:
                self.failed += [failure.trajectory] if failure.trajectory else []
                raise
            del self.progress[request.request_id]
            self.trajectories[request.request_id] = found

        missing = [request for request in self.requests if request.request_id not in self.trajectories]
        tasks = [asyncio.create_task(trajectory(request)) for request in missing]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def oldest_version(self, open_requests: Mapping[int, Generation]) -> float:
        """The oldest weights of any of its tokens, unfinished ones included, or that would sample its first one now;
        infinity if it was not started. The time of its start does not count, as requests may wait unsampled.
        `open_requests` are the engine's."""
        versions: list[float] = [trajectory.weight_version for trajectory in self.trajectories.values()]
        versions += [each.begun.trajectory.weight_version for each in self.progress.values() if each.begun]
        under_way = [open_requests.get(request.request_id) for request in self.requests]
        versions += [generation.oldest_version() for generation in under_way if generation]
        return min(versions, default=float("inf"))


def pack_open(groups: Sequence[OpenGroup]) -> tuple[list[Record], Arrays]:
    """JSON records of the groups, and arrays of their trajectories so far: `in_flight/...` of those that are complete,
    and `begun/...` of others, if there are any."""
    packed, arrays = pack_trajectories([t for group in groups for t in group.trajectories.values()], "in_flight")
    begun = [each.begun for group in groups for each in group.progress.values() if each.begun]
    packed_begun, begun_arrays = pack_trajectories([each.trajectory for each in begun], "begun")
    trajectories = iter(packed)
    others = (
        {**record, "observations": list(each.observations), "snapshot": each.snapshot}
        for record, each in zip(packed_begun, begun, strict=True)
    )
    records = [
        {
            "prompt": group.prompt.index,
            "request_ids": [request.request_id for request in group.requests],
            "responses": [next(trajectories) for _ in group.trajectories],
            **({"begun": [next(others) for _ in group.progress]} if group.progress else {}),
        }
        for group in groups
    ]
    return records, {**arrays, **begun_arrays} if begun else arrays


def unpack_open(
    records: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, Any],
    prompts: Sequence[Prompt],
    make_requests: Callable[[Sequence[int], Prompt], Sequence[GenerationRequest]],
    *,
    keeps_trajectories: bool = True,
) -> list[OpenGroup]:
    """The inverse of `pack_open` of copies, with or without the trajectories: the groups ask again, with the same ids,
    for what is missing."""
    saved = [trajectory for record in records for trajectory in record["responses"]]
    trajectories = iter(unpack_trajectories(saved, arrays, "in_flight", Trajectory))
    saved = [trajectory for record in records for trajectory in record.get("begun", [])]
    begun = iter(unpack_trajectories(saved, arrays, "begun", Trajectory))
    groups = []
    for record in records:
        prompt = prompts[record["prompt"]]
        present = {saved["request_id"]: next(trajectories) for saved in record["responses"]}
        progress = {
            saved["request_id"]: Progress(Begun(next(begun), tuple(saved["observations"]), saved["snapshot"]))
            for saved in record.get("begun", [])
        }
        requests = tuple(make_requests(record["request_ids"], prompt))
        groups.append(OpenGroup(prompt, requests, *((present, progress) if keeps_trajectories else ())))
    return groups
