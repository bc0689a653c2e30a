"""Dynamic sampling (DAPO section 3.2): holds groups until there are enough for a step, and counts every dropped
group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dapo_mega.types import Group


@dataclass
class GroupCounts:
    """Counts of offered groups by outcome. `stale` counts complete groups that were kept and grew too old; groups given
    up before they were complete are not counted here."""

    offered: int = 0
    kept: int = 0
    all_right: int = 0
    all_wrong: int = 0
    stale: int = 0

    def kept_share(self) -> float:
        return self.kept / self.offered if self.offered else 0.0


@dataclass
class GroupBuffer:
    """Holds groups that carry a learning signal; the oldest are taken first.

    With `dynamic_sampling` a group is kept only when its accuracy is strictly between 0 and 1. Correctness decides, not
    the shaped reward: a group of wrong answers with different length penalties teaches nothing. A surplus group may
    wait for `max_staleness` weight versions.
    """

    dynamic_sampling: bool = True
    max_staleness: int = 1
    groups: list[Group] = field(default_factory=list)
    counts: GroupCounts = field(default_factory=GroupCounts)
    # Exponential averages over earlier steps; each step weighs half as much as the next.
    _recent_offered: float = 0.0
    _recent_kept: float = 0.0

    def __len__(self) -> int:
        return len(self.groups)

    def offer(self, group: Group) -> bool:
        """Count the group and keep it if it passes the filter; returns whether it was kept."""
        self.counts.offered += 1
        num_correct = sum(scored.correct for scored in group.responses)
        self.counts.all_right += num_correct == len(group.responses)
        self.counts.all_wrong += num_correct == 0
        keep = not self.dynamic_sampling or 0 < num_correct < len(group.responses)
        if keep:
            self.groups.append(group)
            self.counts.kept += 1
        return keep

    def evict_stale(self, current_version: int) -> int:
        """Drop and count groups sampled more than `max_staleness` versions ago; returns their number."""
        fresh = [g for g in self.groups if current_version - g.weight_version <= self.max_staleness]
        dropped = len(self.groups) - len(fresh)
        self.groups = fresh
        self.counts.stale += dropped
        return dropped

    def take(self, num_groups: int) -> Sequence[Group]:
        """Remove and return the `num_groups` oldest groups, ordered by weight version, then by request id. So the order
        in which engines answer does not matter. Raises ValueError when fewer groups are held."""
        if num_groups > len(self.groups):
            raise ValueError(f"asked for {num_groups} groups, the buffer holds {len(self.groups)}")
        by_age = sorted(self.groups, key=lambda g: (g.weight_version, g.responses[0].response.request_id))
        taken, self.groups = by_age[:num_groups], by_age[num_groups:]
        return taken

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


def max_offered(num_kept: int, kept_share: float) -> int:
    """The most groups to offer such that mean plus three standard deviations of the kept ones is at most `num_kept`, if
    each is kept with probability `kept_share`. At least `num_kept`."""
    deviation = 3 * math.sqrt(kept_share * (1 - kept_share))
    # The positive root sqrt(n) of share n + deviation sqrt(n) = num_kept.
    root = (math.sqrt(deviation**2 + 4 * kept_share * num_kept) - deviation) / (2 * kept_share)
    return max(num_kept, int(root**2))
