"""What was collected for one step, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dapo_mega.metrics import Histogram
from dapo_mega.rollout.buffer import GroupCounts
from dapo_mega.rollout.scoring import ScoringCounts, lengths_of, parts_of, verdicts_of
from dapo_mega.types import STOP_REASONS, Group, GroupFate, GroupOutcome, ScoredTrajectory


@dataclass
class RolloutStats:
    """What was generated for one step, before filtering; `started` is when that began, in seconds.

    Every group ends in one of four ways. Complete groups are offered to the buffer. A group is `dropped` when one of
    its requests failed, `unscored` when one of its responses could not be scored, and `expired` when its tokens became
    too old before it was complete.
    """

    groups: list[Group] = field(default_factory=list)
    scored: list[ScoredTrajectory] = field(default_factory=list)
    greedy: list[ScoredTrajectory] = field(default_factory=list)
    asked_prompts: int = 0
    given_up: list[GroupFate] = field(default_factory=list)
    unscored: list[GroupFate] = field(default_factory=list)
    started: float | None = None
    seconds: float = 0.0

    def begin(self, now: float) -> None:
        """Note the time, if nothing was done for the step before."""
        if self.started is None:
            self.started = now

    def num_given_up(self, outcome: GroupOutcome) -> int:
        """The groups that were not completed, for this reason."""
        return sum(fate.outcome == outcome for fate in self.given_up)

    def metrics(self) -> dict[str, float]:
        """How groups ended, and what the scored responses are like."""
        metrics = {
            "rollout/dropped_groups": float(self.num_given_up("dropped")),
            "rollout/unscored_groups": float(len(self.unscored)),
            "rollout/groups_expired_in_flight": float(self.num_given_up("expired")),
        }
        difficulties = [g.prompt.difficulty for g in self.groups if g.prompt.difficulty is not None]
        if difficulties:
            metrics["sampling/difficulty_mean"] = float(np.mean(sorted(difficulties)))
        if self.greedy:
            metrics["rollout/greedy_reward_mean"] = float(np.mean([s.reward for s in self.greedy]))
        return {**metrics, **self._response_metrics()} if self.scored else metrics

    def histograms(self, groups: Sequence[Group], version: int) -> dict[str, Histogram]:
        """Lengths and rewards of all scored responses, and how old the groups are on which a step that starts from
        weights of `version` trains."""
        values: dict[str, Sequence[float]] = {
            "rollout/response_length": lengths_of(self.scored),
            "rollout/reward": [s.reward for s in self.scored],
            "buffer/staleness": [version - group.weight_version for group in groups],
        }
        return {name: found for name in values if (found := Histogram.of_values(values[name]))}

    def _response_metrics(self) -> dict[str, float]:
        # In the order of requests, because sums of floats depend on the order.
        scored = sorted(self.scored, key=lambda s: s.id)
        lengths = np.array(lengths_of(scored))
        logprobs = np.concatenate([s.logprobs[s.sampled] for s in scored])
        num_tokens = lengths.sum() + sum(lengths_of(self.greedy))
        metrics = {f"reward/part_{name}": float(np.mean(values)) for name, values in parts_of(scored).items()}
        if verdicts := verdicts_of(scored):
            metrics["rollout/accuracy_mean"] = float(np.mean(verdicts))
        if any(s.stop for s in scored):
            metrics["rollout/turns_mean"] = float(np.mean([len(s.turns) for s in scored]))
            stops = Counter(s.stop for s in scored)
            metrics |= {f"rollout/stop_{reason}": stops[reason] / len(scored) for reason in STOP_REASONS}
            sums: Counter[str] = Counter()
            for turn in (turn for s in scored for turn in s.turns):
                sums.update(turn.parts)
            metrics |= {f"environment/part_{name}": sums[name] / len(scored) for name in sorted(sums)}
            metrics["rollout/observed_share"] = 1 - float(lengths.sum()) / sum(s.num_rows for s in scored)
        return {
            **metrics,
            "rollout/reward_mean": float(np.mean([s.reward for s in scored])),
            "rollout/accuracy_reward_mean": float(np.mean([s.accuracy_reward for s in scored])),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_std": float(lengths.std()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_share": float(np.mean([s.is_truncated for s in scored])),
            "rollout/partial_share": float(np.mean([len(s.version_spans) > 1 for s in scored])),
            "rollout/mean_token_probability": float(np.exp(logprobs.astype(np.float64)).mean()),
            "rollout/tokens": float(num_tokens),
            "rollout/tokens_per_s": float(num_tokens / max(self.seconds, 1e-9)),
        }


def scoring_metrics(counts: ScoringCounts) -> dict[str, float]:
    """How scoring went."""
    metrics = {
        f"reward/num_{outcome}": float(counts.outcomes[outcome])
        for outcome in ("no_answer", "timeout", "cut_short", "crash", "refused")
    }
    metrics["reward/num_failed"] = float(counts.failed)
    if counts.asked:
        metrics["reward/failed_share"] = counts.failed / counts.asked
    return metrics


def group_metrics(groups: Sequence[Group], version: int, counts: GroupCounts) -> dict[str, float]:
    """How old the groups are on which a step that starts from weights of `version` trains, and what was offered to the
    buffer."""
    staleness = [version - group.weight_version for group in groups]
    tokens: Counter[int] = Counter()  # The sampled ones, by the steps since the weights that sampled them.
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        start = 0
        for sampled_with, end in trajectory.version_spans:
            if number := int(np.count_nonzero(trajectory.sampled[start:end])):
                tokens[version - sampled_with] += number
            start = end
    metrics = {
        **{f"buffer/token_share_age_{age}": tokens[age] / tokens.total() for age in sorted(tokens)},
        "buffer/staleness_mean": float(np.mean(staleness)),
        "buffer/staleness_max": float(np.max(staleness)),
        "buffer/stale_dropped": float(counts.stale),
        "groups/offered": float(counts.offered),
    }
    if counts.offered:
        metrics["groups/kept_share"] = counts.kept_share()
    if counts.judged:
        metrics["groups/all_right_share"] = counts.all_right / counts.judged
        metrics["groups/all_wrong_share"] = counts.all_wrong / counts.judged
    return metrics
