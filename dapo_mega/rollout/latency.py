"""How long groups take from the submission of their requests to the step that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dapo_mega.types import Group


class GroupLatency:
    """When the requests of groups were submitted. A group is named by the id of its first request; `clock` is in
    seconds.

    Over a restart only the seconds until `state` and those since `load_state` are known and count.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: dict[int, float] = {}

    def start(self, first_request_id: int) -> None:
        """The requests of this group are submitted now."""
        self._started[first_request_id] = self._clock()

    def metrics(self, used: Sequence[Group]) -> dict[str, float]:
        """Mean and maximum over the groups that a step uses now, without those whose start is not known."""
        now = self._clock()
        seconds = [now - self._started[group.id] for group in used if group.id in self._started]
        if not seconds:
            return {}
        return {"time/group_latency_mean_s": float(np.mean(seconds)), "time/group_latency_max_s": max(seconds)}

    def keep_only(self, first_request_ids: Iterable[int]) -> None:
        """Forget all groups but these."""
        self._started = {first: self._started[first] for first in first_request_ids if first in self._started}

    def state(self, first_request_ids: Iterable[int]) -> dict[str, float]:
        """The seconds since the start of each of these groups that is known, as JSON values for a checkpoint."""
        self.keep_only(first_request_ids)
        now = self._clock()
        return {str(first): now - started for first, started in self._started.items()}

    def load_state(self, seconds: Mapping[str, float]) -> None:
        """Continue with the groups of `state`."""
        now = self._clock()
        self._started = {int(first): now - elapsed for first, elapsed in seconds.items()}
