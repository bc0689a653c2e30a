"""Dynamic sampling (DAPO section 3.2): hold groups until a step's worth is there, lose none silently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dapo_mega.types import Group


@dataclass
class GroupCounts:
    """What happened to the groups offered; every drop has a name."""

    offered: int = 0
    kept: int = 0
    all_right: int = 0
    all_wrong: int = 0
    stale: int = 0

    def kept_share(self) -> float:
        return self.kept / self.offered if self.offered else 0.0


@dataclass
class GroupBuffer:
    """First-in first-out store of groups that carry a signal.

    With `dynamic_sampling` a group is kept only when its accuracy is strictly between 0 and 1. The test is on
    correctness, never on the shaped reward: a group of wrong answers with different length penalties has
    nothing to teach. `max_staleness` counts weight versions a surplus group may wait.
    """

    dynamic_sampling: bool = True
    max_staleness: int = 1
    groups: list[Group] = field(default_factory=list)
    counts: GroupCounts = field(default_factory=GroupCounts)

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
        """Remove and return the `num_groups` oldest groups. Raises ValueError when fewer are held."""
        if num_groups > len(self.groups):
            raise ValueError(f"asked for {num_groups} groups, the buffer holds {len(self.groups)}")
        taken, self.groups = self.groups[:num_groups], self.groups[num_groups:]
        return taken

    def pop_counts(self) -> GroupCounts:
        """Counts since the last call."""
        counts, self.counts = self.counts, GroupCounts()
        return counts
