"""What the processes of an update tell each other through rank 0's store: which engines have failed, and for which
engines senders wait."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch.distributed as dist

# A round in which an engine is slow again and again ends before its broadcasts give up.
_ROUND_LIMITS = 2


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

    def read_failed(self) -> None:
        """Read which engines have failed since."""
        while self._store.check([key := f"failed/{self._update}/{len(self.failed)}"]):
            self.failed.append(self._store.get(key).decode())

    def report(self, rank: int, round_: int, urls: Sequence[str] = ()) -> None:
        """Tell rank 0 in which round the sender with this rank is, and for which engines it waits there."""
        self._store.set(f"waiting/{rank}", json.dumps([self._update, round_, list(urls)]))

    def reports(self, ranks: Iterable[int]) -> list[tuple[int, Sequence[str]]]:
        """Round and URLs as each of the ranks last reported them; round -1 before its first report of this update."""
        reports = []
        for key in (f"waiting/{rank}" for rank in ranks):
            update, round_, urls = json.loads(self._store.get(key)) if self._store.check([key]) else (None, -1, ())
            reports.append((round_, urls) if update == self._update else (-1, ()))
        return reports


class LateEngines:
    """Finds the engines that hold up an update of `num_rounds`, from its senders' reports.

    The senders go from round to round together, so an engine that does not come may itself wait for a sender that
    waits for another engine. In the earliest round of all senders nobody does: an engine is late that is awaited there,
    or that has everything and does not answer, while nothing changes for `timeout_s`.
    """

    def __init__(self, num_rounds: int, timeout_s: float) -> None:
        self._num_rounds = num_rounds
        self._timeout_s = timeout_s
        self._round = (-1, 0.0)
        self._since: dict[str, tuple[Sequence[int], float]] = {}

    def find(self, reports: Sequence[tuple[int, Sequence[str]]], urls: Iterable[str], now: float) -> set[str]:
        """Those of the engines that are late at the time `now`, in seconds."""
        earliest = min(round_ for round_, _ in reports)
        if earliest != self._round[0]:
            self._round = earliest, now
            self._since.clear()
        awaiting: dict[str, list[int]] = {url: [] for url in urls}
        for sender, (round_, waiting_for) in enumerate(reports):
            for url in waiting_for if round_ == earliest else ():
                awaiting.setdefault(url, []).append(sender)
        late = set()
        for url, senders in awaiting.items():
            if not senders and earliest < self._num_rounds - 1:
                self._since.pop(url, None)
                continue
            if url not in self._since or self._since[url][0] != senders:
                self._since[url] = senders, now
            is_slow = bool(senders) and now - self._round[1] > _ROUND_LIMITS * self._timeout_s
            if is_slow or now - self._since[url][1] > self._timeout_s:
                late.add(url)
        return late
