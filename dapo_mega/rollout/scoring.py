"""Turns responses into rewards: verdict, rule reward, overlong punishment (DAPO sections 2.4 and 3.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapo_mega.config import RewardConfig
from dapo_mega.data.tokenizer import Decode
from dapo_mega.rewards import AnswerVerifier, accuracy_reward, length_rewards, soft_overlong_punishment
from dapo_mega.types import Prompt, Response, ScoredResponse


class ResponseScorer:
    """Scores responses with the verifier, or with a fair coin as a control experiment (`reward.source=random`)."""

    def __init__(
        self, config: RewardConfig, verifier: AnswerVerifier, decode: Decode, max_response_tokens: int, seed: int
    ) -> None:
        self._config = config
        self._verifier = verifier
        self._decode = decode
        self._max_response_tokens = max_response_tokens
        self._seed = seed
        self.outcomes: Counter[str] = Counter()
        """Verification outcomes (correct, wrong, no_answer, timeout, crash, refused) since `pop_outcomes`."""

    def score(self, asked: Sequence[tuple[Prompt, Response]]) -> list[ScoredResponse]:
        """One scored response per pair, in order."""
        if not asked:
            return []  # Tokenizers decode an empty batch to one empty text.
        texts = self._decode([response.token_ids for _, response in asked])
        if self._config.source == "random":
            verdicts: list[tuple[bool, str | None]] = [(self._coin(response.request_id), None) for _, response in asked]
        else:
            truths = [prompt.ground_truth for prompt, _ in asked]
            verified = self._verifier.verify(list(zip(texts, truths, strict=True)))
            self.outcomes.update(verdict.outcome for verdict in verified)
            verdicts = [(verdict.correct, verdict.answer) for verdict in verified]
        return [
            self._reward(response, text, correct, answer)
            for (_, response), text, (correct, answer) in zip(asked, texts, verdicts, strict=True)
        ]

    def compare(self, members: Sequence[ScoredResponse], step: int) -> list[ScoredResponse]:
        """The responses of one group, with what depends on the others added to their rewards: the length reward, as it
        counts in this step."""
        weight = self._config.length_weight_at(step)
        if not weight:
            return list(members)
        lengths = [len(member.response.token_ids) for member in members]
        rewards = length_rewards(lengths, [member.correct for member in members])
        return [
            replace(member, reward=member.reward + weight * reward)
            for member, reward in zip(members, rewards, strict=True)
        ]

    def pop_outcomes(self) -> Counter[str]:
        """Outcomes since the last call."""
        outcomes, self.outcomes = self.outcomes, Counter()
        return outcomes

    def _coin(self, request_id: int) -> bool:
        return bool(np.random.Philox(key=[self._seed, request_id]).random_raw() & 1)

    def _reward(self, response: Response, text: str, correct: bool, answer: str | None) -> ScoredResponse:
        config = self._config
        base = accuracy_reward(correct, config.correct, config.incorrect)
        punishment = 0.0
        if config.overlong_punishment:
            punishment = soft_overlong_punishment(
                len(response.token_ids), self._max_response_tokens, config.overlong_cache_tokens
            )
        return ScoredResponse(response, text, correct, base, base + punishment, answer)
