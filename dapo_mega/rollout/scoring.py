"""Turns responses into rewards: the run's reward, then what compares the responses of a group."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from dapo_mega.config import RewardConfig
from dapo_mega.config.components import LengthKimiComponent
from dapo_mega.data.tokenizer import Decode
from dapo_mega.distributed.event_loops import beside
from dapo_mega.errors import InputError
from dapo_mega.metrics.timeline import Activity
from dapo_mega.rewards import ComposedReward, RewardRecord, ScoringFailure, length_rewards
from dapo_mega.rewards.thoughts import opened_thought
from dapo_mega.rewards.trial import made_up_record
from dapo_mega.types import Prompt, ScoredTrajectory, Trajectory

logger = logging.getLogger(__name__)

Asked = Sequence[tuple[Prompt, Trajectory]]
Results = list[ScoredTrajectory | ScoringFailure]


@dataclass
class ScoringCounts:
    """How scoring went: `outcomes` of judgements (correct, wrong, no_answer, timeout, cut_short, crash, refused; see
    `Verdict`), and responses that were asked for and that could not be scored."""

    outcomes: Counter[str]
    asked: int = 0
    failed: int = 0


class ResponseScorer:
    """Scores responses by `reward`, which others may use too.

    Raises InputError when more than `reward.max_failed_share` of `usual_responses` (or of those scored since
    `pop_counts`, if they are more) could not be scored; the first failure is logged in full.
    """

    def __init__(
        self,
        config: RewardConfig,
        reward: ComposedReward,
        decode: Decode,
        usual_responses: int = 1,
    ) -> None:
        """`reads_answers`: whether the reward may say which answer a response gave."""
        self._reward = reward
        self._decode = decode
        self._max_failed_share = config.max_failed_share
        self._usual_responses = usual_responses
        self._comparison = next((part for part in config.parts if isinstance(part, LengthKimiComponent)), None)
        self.reads_answers = any(p.label == config.deciding and p.reads_answers for p in config.parts)
        self._first_failure: ScoringFailure | None = None
        self.counts = ScoringCounts(Counter())

    def score(self, asked: Asked) -> Results:
        """One result per pair, in order."""
        if not asked:
            return []  # Tokenizers decode an empty batch to one empty text.
        texts = self._decode([trajectory.sampled_ids for _, trajectory in asked])
        records = [record_of(*pair, text) for pair, text in zip(asked, texts, strict=True)]
        results: Results = []
        for (_, trajectory), text, score in zip(asked, texts, self._reward.score(records), strict=True):
            if isinstance(score, ScoringFailure):
                results.append(score)
                continue
            if score.outcome:
                self.counts.outcomes[score.outcome] += 1
            results.append(
                ScoredTrajectory.judged(
                    trajectory,
                    text=text,
                    correct=score.correct,
                    accuracy_reward=score.score,
                    reward=score.reward,
                    answer=score.answer,
                    parts=score.parts,
                )
            )
        self._count(len(asked), [result for result in results if isinstance(result, ScoringFailure)])
        return results

    def compare(self, members: Sequence[ScoredTrajectory], step: int) -> list[ScoredTrajectory]:
        """The responses of one group, with what depends on the others added to their rewards: the length reward, as it
        counts in this step."""
        if not self._comparison or not (weight := self._comparison.weight_at(step)):
            return list(members)
        verdicts = verdicts_of(members)
        if len(verdicts) < len(members):
            raise InputError(
                "the length reward (reward.length_weight, kind length_kimi) needs to know which responses are correct, "
                "but the reward did not say so of all; leave the length reward out, or return correct=True or False"
            )
        rewards = length_rewards(lengths_of(members), verdicts)
        name = self._comparison.label
        return [
            replace(member, reward=member.reward + weight * reward, parts={**member.parts, name: reward})
            for member, reward in zip(members, rewards, strict=True)
        ]

    def pop_counts(self) -> ScoringCounts:
        """Counts since the last call, which ends a step."""
        self._reward.begin_step()
        counts, self.counts = self.counts, ScoringCounts(Counter())
        return counts

    def _count(self, num_asked: int, failures: Sequence[ScoringFailure]) -> None:
        self.counts.asked += num_asked
        self.counts.failed += len(failures)
        if not failures:
            return
        if self._first_failure is None:
            self._first_failure = failures[0]
            detail = f"\n{failures[0].detail.rstrip()}" if failures[0].detail else ""
            logger.warning(
                "a response could not be scored, and its group is dropped; further ones are only counted "
                "(reward/num_failed): %s%s",
                failures[0].reason,
                detail,
            )
        total = max(self.counts.asked, self._usual_responses)
        if self.counts.failed > self._max_failed_share * total:
            raise InputError(
                f"{self.counts.failed} of {total} responses of a step could not be scored, more than "
                f"reward.max_failed_share={self._max_failed_share:g} allows; the first failure, whose traceback is "
                f"above: {self._first_failure.reason}"
            )


class ScoringQueue:
    """Scores beside the event loop, a batch at a time: all that is asked while the batch before is scored. A call that
    hangs keeps nobody who is cancelled; the reward must then be closed."""

    def __init__(self, scorer: ResponseScorer, activity: Activity) -> None:
        """`activity` notes when responses are scored."""
        self._scorer = scorer
        self._activity = activity
        self._waiting: list[tuple[Asked, asyncio.Future[Results]]] = []
        self._task: asyncio.Task[None] | None = None

    async def score(self, asked: Asked) -> Results:
        results: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, results))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await results

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                together = [pair for asked, _ in batch for pair in asked]
                try:
                    with self._activity.scoring(len(together)):
                        scored = iter(await beside(partial(self._scorer.score, together)))
                except Exception as error:
                    for _, results in batch:
                        if not results.done():
                            results.set_exception(error)
                    continue
                for asked, results in batch:
                    of_group = list(islice(scored, len(asked)))
                    if not results.done():
                        results.set_result(of_group)
        finally:
            self._task = None


def record_of(prompt: Prompt, trajectory: Trajectory, text: str) -> RewardRecord:
    """What a reward is given for a response whose text is `text`."""
    return RewardRecord(
        prompt=prompt.problem or prompt.text,
        messages=prompt.messages,
        response=text,
        token_ids=trajectory.sampled_ids,
        finish_reason=trajectory.finish_reason,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        fields=prompt.fields,
        request_id=trajectory.id,
        opened_thought=opened_thought(prompt.text, prompt.messages, prompt.problem),
        turns=tuple(turn.parts for turn in trajectory.turns),
    )


def trial_record(prompt: Prompt) -> RewardRecord:
    """What a reward is given for a made-up response to a prompt."""
    return made_up_record(
        prompt.problem or prompt.text, prompt.messages, prompt.ground_truth, prompt.data_source, prompt.fields
    )


def lengths_of(trajectories: Iterable[Trajectory]) -> list[int]:
    """Their sampled tokens."""
    return [trajectory.length for trajectory in trajectories]


def verdicts_of(scored: Iterable[ScoredTrajectory]) -> list[bool]:
    """Whether they are correct, of those of which the reward says so."""
    return [trajectory.correct for trajectory in scored if trajectory.correct is not None]


def parts_of(scored: Sequence[ScoredTrajectory]) -> dict[str, list[float]]:
    """The values of every part that any of the responses has, by name."""
    values: dict[str, list[float]] = {}
    for response in scored:
        for name, value in response.parts.items():
            values.setdefault(name, []).append(value)
    return values
