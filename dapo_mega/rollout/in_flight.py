"""Tracks groups whose responses are being generated, and hands a group out when it is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_mega.engines.protocol import RolloutEngine
from dapo_mega.trajectory_records import Arrays, Record, pack_trajectories, unpack_trajectories
from dapo_mega.types import Answer, GenerationFailure, GenerationRequest, GroupFate, GroupOutcome, Prompt, Trajectory

CompleteGroup = tuple[Prompt, list[Trajectory]]


@dataclass(eq=False)
class PendingGroup:
    """A prompt with the trajectories it has so far, by request id."""

    prompt: Prompt
    requests: tuple[GenerationRequest, ...]
    trajectories: dict[int, Trajectory] = field(default_factory=dict)

    def complete(self) -> CompleteGroup | None:
        """The prompt with all its responses, in the order of the requests; None while one is missing."""
        if len(self.trajectories) < len(self.requests):
            return None
        return self.prompt, [self.trajectories[request.request_id] for request in self.requests]


class GroupsInFlight:
    """Tracks the groups in flight and their unanswered requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._groups: list[PendingGroup] = []
        self._waiting: dict[int, PendingGroup] = {}
        # Complete or given up, but not yet returned to the caller.
        self._ended: deque[PendingGroup] = deque()
        self._fates: list[GroupFate] = []

    def __len__(self) -> int:
        return len(self._groups) + len(self._ended)

    def start(self, prompt: Prompt, requests: Sequence[GenerationRequest]) -> None:
        """Submit the requests of a new group."""
        group = PendingGroup(prompt, tuple(requests))
        self._groups.append(group)
        self._submit(group)

    def put_back(self, complete: PendingGroup) -> None:
        """Take back a group that the caller could not use: complete, or for a run that continues to ask again."""
        self._ended.append(complete)

    def submit_missing(self) -> None:
        """Submit requests that are neither answered nor submitted, as after `load_state`."""
        for group in self._groups:
            self._submit(group)

    def arrived(self) -> list[CompleteGroup | None]:
        """All groups that `next_complete` would return without waiting: the complete ones, and None for each that is
        dropped."""
        return [*self.pop_complete(), *[None] * self.pop_dropped()]

    def pop_complete(self) -> list[CompleteGroup]:
        """All complete groups that are there. Those that are dropped wait for `pop_dropped`."""
        self._read_arrived()
        found = [(group, group.complete()) for group in self._ended]
        self._ended = deque(group for group, complete in found if complete is None)
        return [complete for _, complete in found if complete is not None]

    def pop_dropped(self) -> int:
        """How many dropped groups there are that `arrived` would return."""
        complete = [group for group in self._ended if group.complete()]
        num_dropped = len(self._ended) - len(complete)
        self._ended = deque(complete)
        return num_dropped

    def next_complete(self) -> CompleteGroup | None:
        """Wait until a group is complete; None if a group is dropped because one of its requests failed.

        Raises FleetError when lost engines do not come back in time.
        """
        while not self._ended:
            self._take(self._engine.next_answer())
        return self._ended.popleft().complete()

    def cancel_older_than(self, version: int) -> int:
        """Give up the incomplete groups with tokens of weights older than `version`, unfinished responses included;
        returns their number. The time of submission does not count, as requests may wait unsampled."""
        oldest = self._engine.oldest_versions(list(self._waiting))
        stale = []
        for group in self._groups:
            versions = [trajectory.weight_version for trajectory in group.trajectories.values()]
            versions += [oldest[request_id] for request_id in self._waited_for(group) if request_id in oldest]
            if versions and min(versions) < version:
                stale.append(group)
        for group in stale:
            self._give_up(group, "expired")
        return len(stale)

    @property
    def num_running(self) -> int:
        """Groups that lack responses."""
        return len(self._groups)

    def first_request_ids(self) -> list[int]:
        """The id of the first request of each group."""
        return [group.requests[0].request_id for group in (*self._ended, *self._groups)]

    def state(self, complete: Sequence[PendingGroup] = ()) -> tuple[list[Record], Arrays]:
        """JSON records of the groups in flight, and arrays `in_flight/...` of their responses so far; `complete` are
        groups that are to be as if they were in flight."""
        self._read_arrived()
        groups = [*complete, *self._ended, *self._groups]
        packed, arrays = pack_trajectories([r for group in groups for r in group.trajectories.values()], "in_flight")
        trajectories = iter(packed)
        records = [
            {
                "prompt": group.prompt.index,
                "request_ids": [request.request_id for request in group.requests],
                "responses": [next(trajectories) for _ in group.trajectories],
            }
            for group in groups
        ]
        return records, arrays

    def load_state(
        self,
        records: Sequence[Mapping[str, Any]],
        arrays: Mapping[str, Any],
        prompts: Sequence[Prompt],
        make_requests: Callable[[Sequence[int], Prompt], Sequence[GenerationRequest]],
        group_size: int,
        keeps_responses: bool = True,
    ) -> None:
        """Continue with those groups of `state` that have so many requests, with or without the responses that they
        have; `submit_missing` submits their missing ones with the same ids."""
        saved = [trajectory for record in records for trajectory in record["responses"]]
        trajectories = iter(unpack_trajectories(saved, arrays, "in_flight", Trajectory))
        for record in records:
            prompt = prompts[record["prompt"]]
            requests = tuple(make_requests(record["request_ids"], prompt))
            present = {saved["request_id"]: next(trajectories) for saved in record["responses"]}
            group = PendingGroup(prompt, requests, present if keeps_responses else {})
            if len(requests) == group_size:
                (self._ended if group.complete() else self._groups).append(group)

    def _submit(self, group: PendingGroup) -> None:
        missing = [
            request
            for request in group.requests
            if request.request_id not in group.trajectories and request.request_id not in self._waiting
        ]
        if missing:
            self._waiting.update((request.request_id, group) for request in missing)
            self._engine.submit(missing)

    def _waited_for(self, group: PendingGroup) -> list[int]:
        return [request.request_id for request in group.requests if request.request_id in self._waiting]

    def _read_arrived(self) -> None:
        while answer := self._engine.poll_answer():
            self._take(answer)

    def _take(self, answer: Answer) -> None:
        """Add the answer to its group; a complete or failed group ends."""
        group = self._waiting.pop(answer.request_id, None)
        if group is None:
            return  # Its request was cancelled meanwhile.
        if isinstance(answer, GenerationFailure):
            self._give_up(group, "dropped")
            self._ended.append(group)
            return
        group.trajectories[answer.request_id] = Trajectory.of(answer)
        if group.complete():
            self._groups.remove(group)
            self._ended.append(group)

    def cancel_all(self) -> None:
        """Give up all groups."""
        for group in list(self._groups):
            self._give_up(group, "dropped")
        self._ended.clear()

    def pop_fates(self) -> list[GroupFate]:
        """The groups given up since the last call, with the responses that they had."""
        fates, self._fates = self._fates, []
        return fates

    def _give_up(self, group: PendingGroup, outcome: GroupOutcome) -> None:
        self._groups.remove(group)
        self._fates.append(GroupFate(outcome, group.prompt, unscored=tuple(group.trajectories.values())))
        waiting = self._waited_for(group)
        for request_id in waiting:
            del self._waiting[request_id]
        self._engine.cancel(waiting)
