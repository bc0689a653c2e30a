"""The account of trajectories in turns: what became of them, and how often their environments failed."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import defaultdict
from dataclasses import replace

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.config.environment import InTurns
from dapo_mega.environments.base import Environment, Generate, Progress, TrajectoryFailure
from dapo_mega.rewards.processes import CallError
from dapo_mega.types import GenerationFailure, GenerationRequest, Prompt, Trajectory

logger = logging.getLogger(__name__)


class DiffersError(Exception):
    """An environment that was brought to a state again did something else on the way."""


Counts = defaultdict[str, float]
"""Of a step: trajectories by what became of them (started, finished, failed, cancelled), other events, and the seconds
that calls of environments took."""


class InTurnsEnvironment(Environment):
    """An environment whose trajectories are counted.

    Raises InputError when more than `max_failed_share` of a step's trajectories, or of `usual_trajectories` if these
    are more, failed by their environments; the first failure is logged in full.
    """

    def __init__(self, own: InTurns, usual_trajectories: int) -> None:
        self._own = own
        self._usual_trajectories = usual_trajectories
        self._counts = Counts(float)
        self._num_open = 0
        self._first_failure = ""

    async def run(
        self, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        """Ends as `Trajectory.stop` says: the environment is done, `max_turns` or `trajectory_limit_s` is reached, or
        the next turn (tokens) or observation (context) has no place in the `max_new_tokens` of the request, which are
        for all rows."""
        self._num_open += 1
        self._counts["started"] += 1
        became = "cancelled"
        try:
            trajectory = await self._run(prompt, request, generate, progress)
            became = "finished"
            return trajectory
        except GenerationFailure:
            became = "failed"
            raise
        except CallError as error:
            self._note_failure(error)
            became, begun = "failed", progress.begun
            failed = replace(begun.trajectory, stop="failed") if begun else None
            raise TrajectoryFailure(request.request_id, str(error), failed) from None
        except MisuseError as error:
            raise self._own.unusable(error) from None
        finally:
            self._num_open -= 1
            self._counts[became] += 1

    def pop_metrics(self) -> dict[str, float]:
        events, self._counts = self._counts, Counts(float)
        metrics = {
            f"environment/trajectories_{state}": events[state]
            for state in ("started", "finished", "failed", "cancelled")
        }
        metrics["environment/trajectories_open"] = float(self._num_open)
        metrics |= {f"environment/{event}": events[event] for event in ("retries", "replays", "differing")}
        if events["calls"]:
            metrics["time/environment_call_s"] = events["call_s"] / events["calls"]
        return metrics

    @abstractmethod
    async def _run(
        self, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        """As `run`. Raises CallError where its environment failed once too often."""

    def note_differing(self, error: DiffersError) -> None:
        """Count a trajectory that begins anew."""
        self._counts["differing"] += 1
        if self._counts["differing"] == 1:
            logger.warning("environment: %s: a trajectory begins anew: %s", self._own.title, error)

    def _note_failure(self, error: CallError) -> None:
        """Count a trajectory that failed by its environment. Raises InputError if there are too many."""
        events = self._counts
        events["environment_failed"] += 1
        if not self._first_failure:
            self._first_failure = str(error)
            logger.warning(
                "environment: %s: %s; the group of its trajectory is dropped, and further ones are only counted "
                "(environment/trajectories_failed)%s",
                self._own.title,
                error,
                f"\n{error.detail.rstrip()}" if error.detail else "",
            )
        num_failed, total = events["environment_failed"], max(events["started"], self._usual_trajectories)
        if num_failed > self._own.max_failed_share * total:
            raise self._own.unusable(
                f"{num_failed:g} of {total:g} trajectories of a step failed by their environments, more than "
                f"environment.max_failed_share={self._own.max_failed_share:g} allows; the first failure, whose "
                f"traceback is above: {self._first_failure}"
            )
