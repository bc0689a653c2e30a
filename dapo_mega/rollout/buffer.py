"""Dynamic sampling (DAPO section 3.2): holds groups until there are enough for a step, and counts every dropped
group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dapo_mega.algorithms.filters import CorrectnessFilter, GroupFilter
from dapo_mega.types import Group, GroupFate, GroupOutcome


@dataclass
class GroupCounts:
    """Counts of offered groups by outcome. `judged` are those whose responses pass or fail by themselves, which
    `all_right` and `all_wrong` are of; `stale` counts complete groups that were kept and grew too old. Groups given up
    before they were complete are not counted here."""

    offered: int = 0
    kept: int = 0
    judged: int = 0
    all_right: int = 0
    all_wrong: int = 0
    stale: int = 0

    def kept_share(self) -> float:
        return self.kept / self.offered if self.offered else 0.0


@dataclass
class GroupBuffer:
    """Holds groups that carry a learning signal; the oldest are taken first.

    With `dynamic_sampling` a group is kept if the `filter` says so. A surplus group may wait for `max_staleness` weight
    versions.
    """

    dynamic_sampling: bool = True
    max_staleness: int = 1
    filter: GroupFilter = field(default_factory=CorrectnessFilter)
    groups: list[Group] = field(default_factory=list)
    counts: GroupCounts = field(default_factory=GroupCounts)
    _fates: dict[int, GroupFate] = field(default_factory=dict)
    # Exponential averages over earlier steps; each step weighs half as much as the next.
    _recent_offered: float = 0.0
    _recent_kept: float = 0.0

    def __len__(self) -> int:
        return len(self.groups)

    def offer(self, group: Group) -> bool:
        """Count the group and keep it if it passes the filter; returns whether it was kept. Raises InputError where the
        filter cannot say so."""
        self.counts.offered += 1
        keep = self.keeps(group)
        passed = [self.filter.passes(scored) for scored in group.trajectories]
        is_judged = None not in passed
        all_right, all_wrong = is_judged and all(passed), is_judged and not any(passed)
        self.counts.judged += is_judged
        self.counts.all_right += all_right
        self.counts.all_wrong += all_wrong
        if keep:
            self.groups.append(group)
            self.counts.kept += 1
        self._note(
            group, "surplus" if keep else "all_right" if all_right else "all_wrong" if all_wrong else "no_signal"
        )
        return keep

    def keeps(self, group: Group) -> bool:
        """Whether the group would be kept. Raises InputError where the filter cannot say so."""
        return not self.dynamic_sampling or self.filter.keeps(group)

    def evict_stale(self, current_version: int) -> int:
        """Drop and count groups sampled more than `max_staleness` versions ago; returns their number."""
        stale = [group for group in self.groups if current_version - group.weight_version > self.max_staleness]
        for group in stale:
            self.groups.remove(group)
            self._note(group, "stale")
        self.counts.stale += len(stale)
        return len(stale)

    def take(self, num_groups: int) -> Sequence[Group]:
        """Remove and return the `num_groups` oldest groups, ordered by weight version, then by request id. So the order
        in which engines answer does not matter. Raises ValueError when fewer groups are held."""
        if num_groups > len(self.groups):
            raise ValueError(f"asked for {num_groups} groups, the buffer holds {len(self.groups)}")
        by_age = sorted(self.groups, key=lambda g: (g.weight_version, g.id))
        taken, self.groups = by_age[:num_groups], by_age[num_groups:]
        for group in taken:
            self._fates.pop(group.id, None)  # Notes of taken groups come last, in their order.
            self._note(group, "trained")
        return taken

    def pop_fates(self) -> list[GroupFate]:
        """Where the groups went that were offered, taken or dropped since the last call: in the order in which they
        were taken, then the others by request id. Those of them that are still held are `surplus`."""
        fates, self._fates = self._fates, {}
        taken = [fate for fate in fates.values() if fate.outcome == "trained"]
        others = [key for key, fate in fates.items() if fate.outcome != "trained"]
        return [*taken, *(fates[key] for key in sorted(others))]

    def _note(self, group: Group, outcome: GroupOutcome) -> None:
        self._fates[group.id] = GroupFate(outcome, group.prompt, group)

    def pop_counts(self) -> GroupCounts:
        """Counts since the last call."""
        counts, self.counts = self.counts, GroupCounts()
        self._recent_offered = (self._recent_offered + counts.offered) / 2
        self._recent_kept = (self._recent_kept + counts.kept) / 2
        return counts

    def recent_kept_share(self) -> float:
        """The share of recently offered groups that was kept; 1 before the first offer."""
        kept = self._recent_kept + self.counts.kept
        return (kept + 1) / (self._recent_offered + self.counts.offered + 1)
