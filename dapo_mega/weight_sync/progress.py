"""What the processes of an update tell each other through rank 0's store: which engines have failed, and for which
engines senders wait."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist

# An engine that is slow again and again in a round is given up before its broadcasts end by themselves.
_ROUND_LIMITS = 2


class Report(NamedTuple):
    """Where a sender is: its round, the URLs of the engines that it waits for, and of those whose turn comes later."""

    round_: int
    awaited: Sequence[str] = ()
    queued: Sequence[str] = ()


class UpdateNews:
    """What is told in one update. `failed` has the URLs of the engines that have failed, as far as they were read."""

    def __init__(self, store: dist.Store, update: int) -> None:
        self._store = store
        self._update = update
        self._num_added = 0
        self.failed: list[str] = []

    def add_failed(self, url: str) -> None:
        """Tell all processes that the engine has failed. On rank 0."""
        self._store.set(f"failed/{self._update}/{self._num_added}", url)
        self._num_added += 1

    def add_acknowledged(self, url: str) -> None:
        """Tell all processes that the engine says it has everything. On rank 0."""
        self._store.set(f"acknowledged/{self._update}/{url}", "")

    def has_acknowledged(self, url: str) -> bool:
        return bool(self._store.check([f"acknowledged/{self._update}/{url}"]))

    def read_failed(self) -> None:
        """Read which engines have failed since."""
        while self._store.check([key := f"failed/{self._update}/{len(self.failed)}"]):
            self.failed.append(self._store.get(key).decode())

    def report(self, rank: int, round_: int, awaited: Sequence[str] = (), queued: Sequence[str] = ()) -> None:
        """Tell rank 0 in which round the sender with this rank is, for which engines it waits there, and which come
        after these."""
        self._store.set(f"waiting/{rank}", json.dumps([self._update, round_, awaited, queued]))

    def reports(self, ranks: Iterable[int]) -> list[Report]:
        """What each of the ranks last reported; round -1 before its first report of this update."""
        reports = []
        for key in (f"waiting/{rank}" for rank in ranks):
            update, *report = json.loads(self._store.get(key)) if self._store.check([key]) else [None]
            reports.append(Report(*report) if update == self._update else Report(-1))
        return reports


class LateEngines:
    """Finds the engines that hold up an update of `num_rounds`, from its senders' reports.

    The senders go from round to round together, so an engine that does not come may itself wait for a sender that
    waits for another engine. In the earliest round of all senders no awaited engine does: whoever is before it at the
    sender that it waits for is so at all later ones, so it is not awaited there yet. An engine is late that is awaited
    in that round, or that has everything and does not answer, while nothing changes for `timeout_s`.
    """

    def __init__(self, num_rounds: int, timeout_s: float) -> None:
        self._num_rounds = num_rounds
        self._timeout_s = timeout_s
        self._round = -1
        self._first: dict[str, float] = {}
        self._since: dict[str, tuple[Sequence[int], float]] = {}

    def find(self, reports: Sequence[Report], urls: Iterable[str], now: float) -> set[str]:
        """Those of the engines that are late at the time `now`, in seconds."""
        earliest = min(report.round_ for report in reports)
        if earliest != self._round:
            self._round = earliest
            self._first.clear()
            self._since.clear()
        awaiting: dict[str, list[int]] = {url: [] for url in urls}
        queued = {url for report in reports for url in report.queued}
        for sender, report in enumerate(reports):
            for url in report.awaited if report.round_ == earliest else ():
                awaiting.setdefault(url, []).append(sender)
        late = set()
        for url, senders in awaiting.items():
            if not senders and (earliest < self._num_rounds - 1 or url in queued):
                self._since.pop(url, None)
                self._first.pop(url, None)
                continue
            if url not in self._since or self._since[url][0] != senders:
                self._since[url] = senders, now
            is_slow = bool(senders) and now - self._first.setdefault(url, now) > _ROUND_LIMITS * self._timeout_s
            if is_slow or now - self._since[url][1] > self._timeout_s:
                late.add(url)
        return late
