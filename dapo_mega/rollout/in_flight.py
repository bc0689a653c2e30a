"""Groups whose responses are still being generated: answers come one by one, groups leave when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_mega.group_state import Arrays, Record, pack_responses, unpack_responses
from dapo_mega.rollout.engine import StreamingEngine
from dapo_mega.types import GenerationFailure, GenerationRequest, Prompt, Response


@dataclass(eq=False)
class PendingGroup:
    """A prompt with the responses it has so far, by request id. No token of them is older than `oldest_version`."""

    prompt: Prompt
    requests: tuple[GenerationRequest, ...]
    oldest_version: int
    responses: dict[int, Response] = field(default_factory=dict)


class GroupsInFlight:
    """Keeps track of which requests of which groups a streaming engine still owes."""

    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine
        self._groups: list[PendingGroup] = []
        self._waiting: dict[int, PendingGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def start(self, prompt: Prompt, requests: Sequence[GenerationRequest], version: int) -> None:
        """Ask for a group; `version` is that of the engine's weights."""
        group = PendingGroup(prompt, tuple(requests), version)
        self._groups.append(group)
        self._submit(group)

    def submit_missing(self) -> None:
        """Submit what is neither answered nor waited for: requests of a loaded checkpoint."""
        for group in self._groups:
            self._submit(group)

    def next_complete(self) -> tuple[Prompt, list[Response]] | None:
        """Wait until a group is complete; None when one is given up instead, as no engine could serve a request of it.

        Raises FleetError when the engines do not come back in time.
        """
        while True:
            answer = self._engine.next_answer()
            group = self._waiting.pop(answer.request_id, None)
            if group is None:
                continue  # The answer was under way when its request was cancelled.
            if isinstance(answer, GenerationFailure):
                self._give_up(group)
                return None
            group.responses[answer.request_id] = answer
            if len(group.responses) == len(group.requests):
                self._groups.remove(group)
                return group.prompt, [group.responses[request.request_id] for request in group.requests]

    def cancel_older_than(self, version: int) -> int:
        """Give up the groups that may hold tokens of weights before `version`; returns their number."""
        stale = [group for group in self._groups if group.oldest_version < version]
        for group in stale:
            self._give_up(group)
        return len(stale)

    def state(self) -> tuple[list[Record], Arrays]:
        """JSON records of the groups in flight, and arrays `in_flight/...` of the responses that are there."""
        packed, arrays = pack_responses([r for group in self._groups for r in group.responses.values()], "in_flight")
        responses = iter(packed)
        records = [
            {
                "prompt": group.prompt.index,
                "request_ids": [request.request_id for request in group.requests],
                "oldest_version": group.oldest_version,
                "responses": [next(responses) for _ in group.responses],
            }
            for group in self._groups
        ]
        return records, arrays

    def load_state(
        self,
        records: Sequence[Mapping[str, Any]],
        arrays: Mapping[str, Any],
        prompts: Sequence[Prompt],
        make_request: Callable[[int, Prompt], GenerationRequest],
    ) -> None:
        """Continue with the groups of `state`; `submit_missing` asks for what they lack, under the same request ids."""
        saved = [response for record in records for response in record["responses"]]
        responses = iter(unpack_responses(saved, arrays, "in_flight"))
        for record in records:
            prompt = prompts[record["prompt"]]
            requests = tuple(make_request(request_id, prompt) for request_id in record["request_ids"])
            present = {saved["request_id"]: next(responses) for saved in record["responses"]}
            self._groups.append(PendingGroup(prompt, requests, record["oldest_version"], present))

    def _submit(self, group: PendingGroup) -> None:
        missing = [
            request
            for request in group.requests
            if request.request_id not in group.responses and request.request_id not in self._waiting
        ]
        if missing:
            self._waiting.update((request.request_id, group) for request in missing)
            self._engine.submit(missing)

    def _give_up(self, group: PendingGroup) -> None:
        self._groups.remove(group)
        waiting = [request.request_id for request in group.requests if request.request_id in self._waiting]
        for request_id in waiting:
            del self._waiting[request_id]
        self._engine.cancel(waiting)
