"""Held-out evaluation: avg@k, pass@k and maj@k over k sampled responses per prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dapo_mega.config import EvaluationConfig
from dapo_mega.data.tokenizer import Decode
from dapo_mega.engines.protocol import RolloutEngine
from dapo_mega.rewards import AnswerVerifier, Verdict
from dapo_mega.types import GenerationRequest, Prompt, Response, SamplingParams

# Requests of an evaluation are numbered apart from those of training, and alike in every evaluation, so that
# two evaluations differ by the weights and not by luck.
_FIRST_REQUEST_ID = 1 << 62


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is correct) = 1 - C(n-c, k) / C(n, k)."""
    if not 0 < k <= num_samples:
        raise ValueError(f"k={k} must be between 1 and the number of samples {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(verdicts: Sequence[Verdict]) -> bool:
    """Whether the most frequent answer is correct; responses without an answer do not vote, ties go to the first."""
    votes = Counter(verdict.answer for verdict in verdicts if verdict.answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(verdict.correct for verdict in verdicts if verdict.answer == winner)


class Evaluator:
    """Asks every held-out prompt k times and reports `evaluation/...` metrics."""

    def __init__(
        self,
        config: EvaluationConfig,
        prompts: Sequence[Prompt],
        verifier: AnswerVerifier,
        decode: Decode,
        *,
        stop_token_ids: tuple[int, ...],
        max_response_tokens: int,
        seed: int,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._verifier = verifier
        self._decode = decode
        self._seed = seed
        self._sampling = SamplingParams(
            config.temperature, config.top_p, config.top_k, max_response_tokens, stop_token_ids
        )

    def run(self, engine: RolloutEngine) -> dict[str, float]:
        """Failed generations are left out of every mean and counted in `evaluation/failed`."""
        k = self._config.samples_per_prompt
        requests = []
        for i, prompt in enumerate(self._prompts):
            for j in range(k):
                request_id = _FIRST_REQUEST_ID + i * k + j
                seed = (self._seed << 64) | request_id
                requests.append(GenerationRequest(request_id, prompt.token_ids, seed, self._sampling))
        answers = engine.generate(requests)
        answered = [(i // k, a) for i, a in enumerate(answers) if isinstance(a, Response)]
        texts = self._decode([response.token_ids for _, response in answered])
        pairs = [(text, self._prompts[i].ground_truth) for text, (i, _) in zip(texts, answered, strict=True)]
        by_prompt: list[list[Verdict]] = [[] for _ in self._prompts]
        for (i, _), verdict in zip(answered, self._verifier.verify(pairs), strict=True):
            by_prompt[i].append(verdict)
        metrics = self._summary([verdicts for verdicts in by_prompt if verdicts])
        metrics["evaluation/failed"] = float(len(requests) - len(answered))
        if answered:
            lengths = [len(response.token_ids) for _, response in answered]
            metrics["evaluation/response_length_mean"] = float(np.mean(lengths))
            metrics["evaluation/truncated_share"] = float(
                np.mean([response.finish_reason == "length" for _, response in answered])
            )
        return metrics

    def _summary(self, by_prompt: Sequence[Sequence[Verdict]]) -> dict[str, float]:
        metrics = {"evaluation/k": float(self._config.samples_per_prompt)}
        if not by_prompt:
            return metrics
        correct = [sum(verdict.correct for verdict in verdicts) for verdicts in by_prompt]
        sizes = [len(verdicts) for verdicts in by_prompt]
        metrics["evaluation/avg_at_k"] = float(np.mean([c / n for c, n in zip(correct, sizes, strict=True)]))
        metrics["evaluation/maj_at_k"] = float(np.mean([majority_is_correct(v) for v in by_prompt]))
        metrics["evaluation/pass_at_k"] = float(np.mean([c > 0 for c in correct]))
        power = 2
        while power < min(sizes):
            estimates = [pass_at_k(n, c, power) for n, c in zip(sizes, correct, strict=True)]
            metrics[f"evaluation/pass_at_{power}"] = float(np.mean(estimates))
            power *= 2
        return metrics
