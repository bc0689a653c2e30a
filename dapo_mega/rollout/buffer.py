"""Dynamic sampling (DAPO section 3.2): holds groups until there are enough for a step, and counts every dropped
group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dapo_mega.algorithms import are_equal
from dapo_mega.algorithms.own_choices import is_kept
from dapo_mega.config import OwnCode
from dapo_mega.config.algorithm import OTHER_FILTERS, DynamicSamplingOn
from dapo_mega.errors import InputError
from dapo_mega.types import Group, GroupFate, GroupOutcome, ScoredTrajectory


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

    With `dynamic_sampling` a group is kept only when its accuracy is strictly between 0 and 1; or, for rewards that
    judge nothing right or wrong, when some scores reach `score_threshold` and some do not, or not all are equal
    (`dynamic_sampling_on`), or when code of the user's own says so. The shaped reward does not decide: a group of wrong
    answers with different length penalties teaches nothing. A surplus group may wait for `max_staleness` weight
    versions.
    """

    dynamic_sampling: bool = True
    max_staleness: int = 1
    dynamic_sampling_on: DynamicSamplingOn | OwnCode = "correctness"
    score_threshold: float | None = None
    groups: list[Group] = field(default_factory=list)
    counts: GroupCounts = field(default_factory=GroupCounts)
    _fates: dict[int, GroupFate] = field(default_factory=dict)
    # Exponential averages over earlier steps; each step weighs half as much as the next.
    _recent_offered: float = 0.0
    _recent_kept: float = 0.0

    def __len__(self) -> int:
        return len(self.groups)

    def offer(self, group: Group) -> bool:
        """Count the group and keep it if it passes the filter; returns whether it was kept. Raises as `keeps`."""
        self.counts.offered += 1
        keep, passed = self.keeps(group), self._passed(group)
        if None not in passed:
            self.counts.judged += 1
            self.counts.all_right += all(passed)
            self.counts.all_wrong += not any(passed)
        if keep:
            self.groups.append(group)
            self.counts.kept += 1
        self._note(group, "surplus" if keep else _reason(passed))
        return keep

    def keeps(self, group: Group) -> bool:
        """Whether the group passes the filter. Raises InputError where correctness decides and a response has none."""
        if not self.dynamic_sampling:
            return True
        if isinstance(self.dynamic_sampling_on, OwnCode):
            return is_kept(self.dynamic_sampling_on, group)
        if self.dynamic_sampling_on == "unequal_scores":
            return not are_equal([scored.accuracy_reward for scored in group.trajectories])
        passed = self._passed(group)
        if None in passed:
            raise InputError(
                f"algorithm.dynamic_sampling_on=correctness, but the reward did not say of every response whether it "
                f"is correct; {OTHER_FILTERS}"
            )
        return any(passed) and not all(passed)

    def _passed(self, group: Group) -> list[bool | None]:
        return [self.passes(scored) for scored in group.trajectories]

    def passes(self, scored: ScoredTrajectory) -> bool | None:
        """Whether a response is right by itself; None where nothing says so."""
        if self.dynamic_sampling_on == "score_threshold" and self.score_threshold is not None:
            score, threshold = scored.accuracy_reward, self.score_threshold
            return score >= threshold or are_equal([score, threshold])
        return scored.correct

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


def _reason(passed: Sequence[bool | None]) -> GroupOutcome:
    """Why a group was filtered out whose responses pass or fail so."""
    if None in passed:
        return "no_signal"
    return "all_right" if all(passed) else "no_signal" if any(passed) else "all_wrong"
