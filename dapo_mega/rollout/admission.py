"""How many prompts to submit, and what is too old or not to be had: plain functions of counts, for all schedules.

Algorithm 1 of DAPO (arXiv 2503.14476) samples rounds of prompts until a step has its N groups. What that means for
requests is the schedule:

- synchronous: a whole round whenever none is running. Nothing is left in flight when a step has its groups.
- partial: as many groups in flight as the first round has prompts, while a step waits for its groups; those that are
  not complete then go on in the next step.
- asynchronous: as many as this step and the next ones can use before the weights that sampled them are too old, also
  while the trainer trains. Where no token may be older than the weights, nothing can be sampled ahead, and the schedule
  is the synchronous one.

Which engine has a place for a request is `engines/sglang/dispatcher.py`'s to say. `collector.py` states who waits for
whom.

Invariants: a step submits at most `max_generation_rounds` rounds of prompts; groups that are in flight and kept suffice
for so many steps as may use them, with a chance of 0.1 % that one of them is kept in vain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dapo_mega.config import RunConfig
from dapo_mega.config.rollout import Schedule


@dataclass(frozen=True)
class Counts:
    """What there is: `asked` prompts were submitted for the step, `running` groups lack responses, `in_flight` are
    these and those that are complete and not scored; `held` groups are kept, or may be. Of those that are offered
    `kept_share` has been kept lately."""

    asked: int
    running: int
    in_flight: int
    held: int
    kept_share: float


@dataclass(frozen=True)
class Admission:
    """The rule of one run, from its configuration."""

    schedule: Schedule
    groups_per_step: int
    generation_groups: int
    max_generation_rounds: int
    max_staleness: int
    num_steps: int

    @classmethod
    def of(cls, config: RunConfig) -> Admission:
        algorithm = config.algorithm
        return cls(
            schedule=config.rollout.schedule if algorithm.max_staleness else "synchronous",
            groups_per_step=config.batch.groups_per_step,
            generation_groups=config.generation_groups,
            max_generation_rounds=algorithm.max_generation_rounds,
            max_staleness=algorithm.max_staleness,
            num_steps=config.num_steps,
        )

    def num_rounds(self, asked: int) -> int:
        """The rounds that the submitted prompts fill, rounded up."""
        return -(-asked // self.generation_groups)

    def first_round(self, held: int) -> int:
        """Prompts of a step's first round: `generation_groups` times the share of the step's groups that are not held
        when it begins, so that surplus groups are used before they grow old."""
        missing = max(self.groups_per_step - held, 0)
        return -(-self.generation_groups * missing // self.groups_per_step)

    def is_round_running(self, in_flight: int) -> bool:
        """Whether a step must wait, though it has its groups, as a round is answered as a whole."""
        return self.schedule == "synchronous" and in_flight > 0

    def oldest_version(self, version: int) -> int:
        """The oldest weights whose tokens the step that starts from weights of `version` may train on."""
        return version - self.max_staleness

    def is_starved(self, counts: Counts) -> bool:
        """Whether a step that lacks groups, and has just submitted what it may, waits in vain."""
        return counts.in_flight == 0

    def while_a_step_waits(self, counts: Counts, first_round: int, version: int) -> int:
        """Prompts to submit in the step that starts from weights of `version`."""
        if self.schedule == "partial":
            return self._missing(counts, min(first_round, self._useful(counts, num_steps=2)))
        if self.schedule == "asynchronous":
            return self._missing(counts, self._useful(counts, self._steps_ahead(version) + 1))
        if self.is_round_running(counts.in_flight) or self.num_rounds(counts.asked) == self.max_generation_rounds:
            return 0
        return self.generation_groups if counts.asked else first_round

    def while_a_step_trains(self, counts: Counts, version: int, *, engines_have_it: bool) -> int:
        """Prompts to submit for the step that will start from weights of `version`, before it waits for its groups.
        What starts before `engines_have_it` is sampled with the weights before these, and a step older."""
        num_steps = self._steps_ahead(version) + 1 if engines_have_it else self._steps_ahead(version - 1)
        return self._missing(counts, self._useful(counts, num_steps))

    def _steps_ahead(self, version: int) -> int:
        """How many steps after the one that starts from weights of `version` may use tokens of these weights."""
        return min(self.max_staleness, self.num_steps - 1 - version)

    def _useful(self, counts: Counts, num_steps: int) -> int:
        """The most groups in flight such that all that are kept, those that are there included, are used by the next
        `num_steps` steps. Groups that wait longer could grow too old."""
        return max_offered(max(num_steps * self.groups_per_step - counts.held, 0), counts.kept_share)

    def _missing(self, counts: Counts, wanted: int) -> int:
        """How many prompts to submit so that `wanted` groups are in flight."""
        most = self.max_generation_rounds * self.generation_groups
        return max(0, min(wanted - counts.running, most - counts.asked))


def max_offered(num_kept: int, kept_share: float) -> int:
    """The most groups to offer such that mean plus three standard deviations of the kept ones is at most `num_kept`, if
    each is kept with probability `kept_share`. At least `num_kept`."""
    deviation = 3 * math.sqrt(kept_share * (1 - kept_share))
    # The positive root sqrt(n) of share n + deviation sqrt(n) = num_kept.
    root = (math.sqrt(deviation**2 + 4 * kept_share * num_kept) - deviation) / (2 * kept_share)
    return max(num_kept, int(root**2))
