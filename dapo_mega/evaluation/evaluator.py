"""Samples k responses per held-out prompt and scores them, in a run and for a model on its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dapo_mega.config import EvaluationConfig, RunConfig
from dapo_mega.data.tokenizer import Decode
from dapo_mega.distributed.event_loops import beside
from dapo_mega.environments.base import SINGLE_TURN, Environment, Generate
from dapo_mega.errors import InputError
from dapo_mega.evaluation.measures import powers_of_two
from dapo_mega.evaluation.statistics import pass_at_each_k
from dapo_mega.evaluation.voting import Votes, count_votes, maj_at_k
from dapo_mega.metrics import Example
from dapo_mega.rewards import ComposedReward
from dapo_mega.rollout.asking import EVALUATION_IDS, Numbering, Rollout, roll_out
from dapo_mega.rollout.scoring import ResponseScorer, parts_of
from dapo_mega.rollout.sources import label_of, source_labels
from dapo_mega.types import GenerationRequest, Prompt, SamplingParams, ScoredTrajectory, Trajectory

EvaluatedResponse = tuple[Prompt, Trajectory]
"""One that could not be scored is no `ScoredTrajectory`."""


def _votes(scored: Sequence[ScoredTrajectory]) -> Votes:
    return count_votes([response.answer for response in scored], [bool(response.correct) for response in scored])


def make_evaluator(
    config: RunConfig,
    prompts: Sequence[Prompt],
    reward: ComposedReward,
    decode: Decode,
    stop_token_ids: tuple[int, ...],
    environment: Environment = SINGLE_TURN,
) -> Evaluator:
    """The run's evaluator, which scores by `reward`. Raises InputError without the environment that the run has."""
    if config.environment.kind != "single_turn" and environment is SINGLE_TURN:
        raise InputError(
            f"environment={config.environment.kind}: responses in turns are evaluated within a run only, by its "
            f"section evaluation; continue the run with evaluation.at_end=true"
        )
    scorer = ResponseScorer(config.reward.for_evaluation(), reward, decode)
    return Evaluator(
        config.evaluation,
        prompts,
        scorer,
        stop_token_ids=stop_token_ids,
        max_response_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
        num_examples=config.tracking.samples_per_evaluation,
        environment=environment,
    )


def _example(prompt: Prompt, scored: ScoredTrajectory) -> Example:
    return Example(prompt.text, scored.text, prompt.ground_truth, scored.correct, scored.answer)


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
        num_examples: int = 0,
        environment: Environment = SINGLE_TURN,
    ) -> None:
        """`examples` are the first responses to `num_examples` prompts in the last evaluation."""
        self.examples: list[Example] = []
        self._environment = environment
        self._num_examples = num_examples
        self._config = config
        self._prompts = prompts
        self._labels = source_labels(prompts)
        self._scorer = scorer
        self._results: list[EvaluatedResponse] = []
        sampling = SamplingParams(config.temperature, config.top_p, config.top_k, max_response_tokens, stop_token_ids)
        # The same in every evaluation: two evaluations differ by the weights only.
        self._numbering = Numbering(EVALUATION_IDS, config.responses_per_prompt, seed, sampling)

    @property
    def requests(self) -> list[GenerationRequest]:
        """k requests per prompt, those of a prompt one after the other. Their seeds depend on the run's seed only."""
        return [request for i, prompt in enumerate(self._prompts) for request in self._numbering.of(i, prompt)]

    def score(self, trajectories: Sequence[Trajectory]) -> list[EvaluatedResponse]:
        """Answers to any of `requests`, scored, with their prompts, in the order given."""
        asked = [(self._prompts[self._numbering.index_of(trajectory.id)], trajectory) for trajectory in trajectories]
        self._scorer.pop_counts()  # Time for slow answers of its own.
        scored = self._scorer.score(asked)
        self._scorer.pop_counts()
        return [
            (prompt, result if isinstance(result, ScoredTrajectory) else trajectory)
            for (prompt, trajectory), result in zip(asked, scored, strict=True)
        ]

    async def roll_out(self, generate: Generate) -> list[Rollout]:
        """What came of `requests`, in their order."""
        asked = [
            (prompt, request) for i, prompt in enumerate(self._prompts) for request in self._numbering.of(i, prompt)
        ]
        return await roll_out(asked, generate, self._environment)

    async def run(self, generate: Generate) -> dict[str, float]:
        """Ask all `requests`, and return the metrics, scored beside the event loop."""
        return await beside(partial(self.measure, await self.roll_out(generate)))

    def measure(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The metrics, of what came of `requests`. Where responses could not be generated (`evaluation/failed`)
        nothing is averaged, as those that are missing are not like the others. Those that could not be scored
        (`evaluation/unscored`) are left out of every mean. Metrics of correctness are left out where the reward does
        not judge it."""
        answered = [rollout for rollout in rollouts if isinstance(rollout, Trajectory)]
        self._results = self.score(answered)
        by_prompt: list[list[ScoredTrajectory]] = [[] for _ in self._prompts]
        for _, trajectory in self._results:
            if isinstance(trajectory, ScoredTrajectory):
                by_prompt[self._numbering.index_of(trajectory.id)].append(trajectory)
        self.examples = self._examples(by_prompt)
        metrics = {
            "evaluation/k": float(self._config.responses_per_prompt),
            "evaluation/failed": float(len(rollouts) - len(answered)),
            "evaluation/unscored": float(len(answered) - sum(map(len, by_prompt))),
        }
        if len(answered) == len(rollouts):
            metrics |= self._summary([responses for responses in by_prompt if responses])
            metrics |= self._of_sources(by_prompt)
            metrics["evaluation/response_length_mean"] = float(np.mean([trajectory.length for trajectory in answered]))
            metrics["evaluation/truncated_share"] = float(np.mean([found.is_truncated for found in answered]))
        return metrics

    def _examples(self, by_prompt: Sequence[Sequence[ScoredTrajectory]]) -> list[Example]:
        """Of prompts all over the data set, the same ones in every evaluation."""
        spacing = max(len(self._prompts) / max(self._num_examples, 1), 1.0)
        chosen = [int(i * spacing) for i in range(min(self._num_examples, len(self._prompts)))]
        return [_example(self._prompts[i], by_prompt[i][0]) for i in chosen if by_prompt[i]]

    def pop_results(self) -> list[EvaluatedResponse]:
        """The responses of the last evaluation, in the order of requests; empty at a second call."""
        results, self._results = self._results, []
        return results

    def _of_sources(self, by_prompt: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, float]:
        """Share of the prompts with a scored response, their avg@k and mean length, for each of several sources."""
        found: dict[str, list[Sequence[ScoredTrajectory]]] = {}
        for prompt, responses in zip(self._prompts, by_prompt, strict=True):
            if responses and (label := label_of(prompt, self._labels)):
                found.setdefault(label, []).append(responses)
        num_prompts = sum(map(len, found.values()))
        metrics: dict[str, float] = {}
        for label, answered in found.items():
            everything = [scored for responses in answered for scored in responses]
            metrics[f"evaluation/share_{label}"] = len(answered) / num_prompts
            metrics[f"evaluation/response_length_mean_{label}"] = float(
                np.mean([scored.length for scored in everything])
            )
            if all(scored.correct is not None for scored in everything):
                metrics[f"evaluation/avg_at_k_{label}"] = float(
                    np.mean([np.mean([scored.correct for scored in responses]) for responses in answered])
                )
        return metrics

    def _summary(self, by_prompt: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if not by_prompt:
            return metrics
        everything = [response for responses in by_prompt for response in responses]
        metrics["evaluation/reward_mean"] = float(np.mean([response.reward for response in everything]))
        for name, values in parts_of(everything).items():
            metrics[f"evaluation/part_{name}"] = float(np.mean(values))
        if any(response.correct is None for response in everything):
            return metrics
        correct = [sum(bool(response.correct) for response in responses) for responses in by_prompt]
        sizes = [len(responses) for responses in by_prompt]
        metrics["evaluation/avg_at_k"] = float(np.mean([c / n for c, n in zip(correct, sizes, strict=True)]))
        if self._scorer.reads_answers:
            metrics["evaluation/maj_at_k"] = float(
                np.mean([maj_at_k(_votes(found), len(found)) for found in by_prompt])
            )
        metrics["evaluation/pass_at_k"] = float(np.mean([c > 0 for c in correct]))
        curve = pass_at_each_k(sizes, correct, min(sizes)).mean(axis=1)
        for k in powers_of_two(min(sizes))[1:-1]:
            metrics[f"evaluation/pass_at_{k}"] = float(curve[k - 1])
        return metrics
