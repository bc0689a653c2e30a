"""Groups that nobody sampled, on which code of the user's own is tried before a run begins."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dapo_mega.types import Group, Prompt, Response, ScoredTrajectory, Trajectory


def made_up_groups(size: int) -> Iterator[Group]:
    """One with right and wrong responses, and one with wrong ones only."""
    prompt = Prompt(0, "1 + 1 =", np.arange(3, dtype=np.int32), "2", problem="1 + 1 =")
    for right in ((size + 1) // 2, 0):
        scored = []
        for i in range(size):
            is_right, length = i < right, 2 + i
            tokens, logprobs = np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32)
            trajectory = Trajectory.of(Response(i, tokens, logprobs, "stop", 0))
            reward = 1.0 if is_right else -1.0
            verdict = {"text": "2" if is_right else "3", "correct": is_right, "answer": "2" if is_right else "3"}
            scored.append(ScoredTrajectory.judged(trajectory, accuracy_reward=reward, reward=reward, **verdict))
        yield Group(prompt, tuple(scored))
