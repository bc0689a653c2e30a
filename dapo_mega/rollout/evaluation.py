"""Held-out evaluation: avg@k, pass@k and maj@k over k sampled responses per prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dapo_mega.config import EvaluationConfig, RunConfig
from dapo_mega.data.tokenizer import Decode
from dapo_mega.rewards import AnswerVerifier
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.types import Answer, GenerationRequest, Prompt, Response, SamplingParams, ScoredResponse

# Evaluation requests have ids apart from training's, and the same ids (so the same seeds) in every evaluation: two
# evaluations differ by the weights only.
_FIRST_REQUEST_ID = 1 << 62


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is correct) = 1 - C(n-c, k) / C(n, k)."""
    if not 0 < k <= num_samples:
        raise ValueError(f"k={k} must be between 1 and the number of samples {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(scored: Sequence[ScoredResponse]) -> bool:
    """Whether the most frequent answer is correct; responses without an answer do not vote, ties go to the first."""
    votes = Counter(response.answer for response in scored if response.answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(response.correct for response in scored if response.answer == winner)


def make_evaluator(
    config: RunConfig,
    prompts: Sequence[Prompt],
    verifier: AnswerVerifier,
    decode: Decode,
    stop_token_ids: tuple[int, ...],
) -> Evaluator:
    """The run's evaluator. Scores like training, but with the verifier even if `reward.source=random`."""
    reward = config.reward.model_copy(update={"source": "verifier"})
    scorer = ResponseScorer(reward, verifier, decode, config.rollout.max_response_tokens, config.seed)
    return Evaluator(
        config.evaluation,
        prompts,
        scorer,
        stop_token_ids=stop_token_ids,
        max_response_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
    )


class Evaluator:
    """Samples k responses per held-out prompt and reports `evaluation/...` metrics."""

    def __init__(
        self,
        config: EvaluationConfig,
        prompts: Sequence[Prompt],
        scorer: ResponseScorer,
        *,
        stop_token_ids: tuple[int, ...],
        max_response_tokens: int,
        seed: int,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._scorer = scorer
        self._seed = seed
        self._sampling = SamplingParams(
            config.temperature, config.top_p, config.top_k, max_response_tokens, stop_token_ids
        )

    def run(self, generate: Callable[[Sequence[GenerationRequest]], Sequence[Answer]]) -> dict[str, float]:
        """Returns the metrics. `generate` answers requests in the order given. Failed generations are left out of every
        mean and counted in `evaluation/failed`."""
        k = self._config.samples_per_prompt
        requests = []
        for i, prompt in enumerate(self._prompts):
            for j in range(k):
                request_id = _FIRST_REQUEST_ID + i * k + j
                seed = (self._seed << 64) | request_id
                requests.append(GenerationRequest(request_id, prompt.token_ids, seed, self._sampling))
        answers = generate(requests)
        answered = [(i // k, answer) for i, answer in enumerate(answers) if isinstance(answer, Response)]
        scored = self._scorer.score([(self._prompts[i], response) for i, response in answered])
        by_prompt: list[list[ScoredResponse]] = [[] for _ in self._prompts]
        for (i, _), response in zip(answered, scored, strict=True):
            by_prompt[i].append(response)
        metrics = self._summary([responses for responses in by_prompt if responses])
        metrics["evaluation/failed"] = float(len(requests) - len(answered))
        if answered:
            lengths = [len(response.token_ids) for _, response in answered]
            metrics["evaluation/response_length_mean"] = float(np.mean(lengths))
            metrics["evaluation/truncated_share"] = float(
                np.mean([response.finish_reason == "length" for _, response in answered])
            )
        return metrics

    def _summary(self, by_prompt: Sequence[Sequence[ScoredResponse]]) -> dict[str, float]:
        metrics = {"evaluation/k": float(self._config.samples_per_prompt)}
        if not by_prompt:
            return metrics
        correct = [sum(response.correct for response in responses) for responses in by_prompt]
        sizes = [len(responses) for responses in by_prompt]
        metrics["evaluation/avg_at_k"] = float(np.mean([c / n for c, n in zip(correct, sizes, strict=True)]))
        metrics["evaluation/maj_at_k"] = float(np.mean([majority_is_correct(responses) for responses in by_prompt]))
        metrics["evaluation/pass_at_k"] = float(np.mean([c > 0 for c in correct]))
        power = 2
        while power < min(sizes):
            estimates = [pass_at_k(n, c, power) for n, c in zip(sizes, correct, strict=True)]
            metrics[f"evaluation/pass_at_{power}"] = float(np.mean(estimates))
            power *= 2
        return metrics
