"""Trajectories of a single answer, with their verdicts."""

from collections.abc import Mapping

from dapo_mega.types import Response, ScoredTrajectory, Trajectory


def scored_answer(
    response: Response,
    text: str,
    correct: bool | None,
    accuracy_reward: float,
    reward: float,
    answer: str | None = None,
    parts: Mapping[str, float] = {},
) -> ScoredTrajectory:
    """The response with this verdict."""
    verdict = {"text": text, "correct": correct, "accuracy_reward": accuracy_reward, "reward": reward}
    return ScoredTrajectory.judged(Trajectory.of(response), **verdict, answer=answer, parts=parts)
