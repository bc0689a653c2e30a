"""What trajectories observed has no part in what is measured of them, nor in what a reward is given.

In updates: `tests/distributed/test_split_invariance.py`.
"""

from dataclasses import replace

import numpy as np

from dapo_mega.rollout.buffer import GroupCounts
from dapo_mega.rollout.collected import RolloutStats, group_metrics
from dapo_mega.rollout.scoring import record_of
from dapo_mega.rollout.sources import metrics_of_sources
from dapo_mega.types import Group, Prompt, ScoredTrajectory, Turn

PROMPT = Prompt(0, "p", np.array([1], np.int32), "1", data_source="a")


def scored(number, draw):
    """One to five turns, each behind an observation; the versions of the weights change within them."""
    runs = [(int(draw.integers(1, 5)), int(draw.integers(1, 5))) for _ in range(1 + number % 5)]
    sampled = np.concatenate([np.repeat([False, True], run) for run in runs])
    ends = np.cumsum([sum(run) for run in runs]).tolist()
    return ScoredTrajectory(
        number,
        draw.integers(0, 9, len(sampled)).astype(np.int32),
        np.where(sampled, -draw.random(len(sampled)), 0).astype(np.float32),
        sampled,
        tuple(Turn(end, "stop", {"reward": 0.5}) for end in ends),
        ((1, 2), (2, len(sampled))),
        (("a", len(sampled)),),
        (len(sampled),),
        "turns",
        text="t",
        correct=number % 2 == 0,
        accuracy_reward=1.0,
        reward=draw.random(),
    )


def otherwise(trajectory, draw):
    """With other observations."""
    noise = draw.integers(0, 9, trajectory.num_rows).astype(np.int32)
    logprobs = -draw.random(trajectory.num_rows, np.float32)
    return replace(
        trajectory,
        token_ids=np.where(trajectory.sampled, trajectory.token_ids, noise),
        logprobs=np.where(trajectory.sampled, trajectory.logprobs, logprobs),
    )


def measures(trajectories):
    groups = [Group(PROMPT, tuple(trajectories[:5])), Group(PROMPT, tuple(trajectories[5:]))]
    stats = RolloutStats(groups, list(trajectories), list(trajectories[:2]), seconds=1.0)
    histograms = {name: vars(found) for name, found in stats.histograms(groups, 2).items()}
    records = [vars(record_of(PROMPT, trajectory, "t")) for trajectory in trajectories]
    for record in records:
        record["token_ids"] = record["token_ids"].tolist()
    others = group_metrics(groups, 2, GroupCounts()), metrics_of_sources(groups, {("", "a"): "a"})
    return stats.metrics(), histograms, others, records


def test_other_observations_move_no_metric_no_histogram_and_no_record_of_a_reward():
    draw = np.random.default_rng(0)
    trajectories = [scored(number, draw) for number in range(10)]
    others = [otherwise(trajectory, draw) for trajectory in trajectories]
    assert any((a.token_ids != b.token_ids).any() for a, b in zip(trajectories, others, strict=True))
    assert measures(trajectories) == measures(others)
