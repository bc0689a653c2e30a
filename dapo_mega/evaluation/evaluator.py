"""Samples k responses per held-out prompt and scores them, in a run and for a model on its own."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from dapo_mega.config import RunConfig
from dapo_mega.data.tokenizer import Decode
from dapo_mega.distributed.event_loops import beside
from dapo_mega.environments.base import SINGLE_TURN, Environment, Generate
from dapo_mega.evaluation.measures import powers_of_two
from dapo_mega.evaluation.statistics import pass_at_each_k
from dapo_mega.evaluation.voting import count_votes, maj_at_k
from dapo_mega.metrics import Example
from dapo_mega.rewards import ComposedReward
from dapo_mega.rollout.asking import EVALUATION_IDS, Numbering, Rollout, roll_out
from dapo_mega.rollout.scoring import ResponseScorer, lengths_of, parts_of
from dapo_mega.rollout.sources import by_label, source_labels
from dapo_mega.types import GenerationRequest, Prompt, SamplingParams, ScoredTrajectory, Trajectory

EvaluatedResponse = tuple[Prompt, Trajectory]
"""One that could not be scored is no `ScoredTrajectory`."""


class Evaluator:
    """Samples k responses per held-out prompt and reports `evaluation/...` metrics."""

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        reward: ComposedReward,
        decode: Decode,
        stop_token_ids: tuple[int, ...],
        environment: Environment = SINGLE_TURN,
        num_tokens: int | None = None,
    ) -> None:
        """`examples` are the first responses to some prompts in the last evaluation."""
        self.examples: list[Example] = []
        self._environment = environment
        self._num_examples = config.tracking.samples_per_evaluation
        self._k = config.evaluation.responses_per_prompt
        self._prompts = prompts
        self._labels = source_labels(prompts)
        self._scorer = ResponseScorer(config.reward.for_evaluation(), reward, decode)
        self._results: list[EvaluatedResponse] = []
        how, longest, stop = config.evaluation, config.rollout.max_response_tokens, config.rollout.stop
        sampling = SamplingParams(how.temperature, how.top_p, how.top_k, longest, stop_token_ids, num_tokens, stop)
        # The same in every evaluation: two evaluations differ by the weights only.
        self._numbering = Numbering(EVALUATION_IDS, self._k, config.seed, sampling)

    @property
    def _asked(self) -> list[tuple[Prompt, GenerationRequest]]:
        """k requests per prompt, those of a prompt one after the other. Their seeds depend on the run's seed only."""
        return [
            (prompt, request) for i, prompt in enumerate(self._prompts) for request in self._numbering.of(i, prompt)
        ]

    @property
    def requests(self) -> list[GenerationRequest]:
        """The requests of an evaluation, those of a prompt one after the other."""
        return [request for _, request in self._asked]

    def prompted(self, requests: Sequence[GenerationRequest]) -> list[tuple[Prompt, GenerationRequest]]:
        """Some of `requests`, each with its prompt."""
        return [(self._prompts[self._numbering.index_of(request.request_id)], request) for request in requests]

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
        return await roll_out(self._asked, generate, self._environment)

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
            "evaluation/k": float(self._k),
            "evaluation/failed": float(len(rollouts) - len(answered)),
            "evaluation/unscored": float(len(answered) - sum(map(len, by_prompt))),
        }
        if len(answered) == len(rollouts):
            metrics |= self._summary([responses for responses in by_prompt if responses])
            metrics |= self._of_sources(by_prompt)
            metrics["evaluation/response_length_mean"] = float(np.mean(lengths_of(answered)))
            metrics["evaluation/truncated_share"] = float(np.mean([found.is_truncated for found in answered]))
        return metrics

    def _examples(self, by_prompt: Sequence[Sequence[ScoredTrajectory]]) -> list[Example]:
        """Of prompts all over the data set, the same ones in every evaluation."""
        spacing = max(len(self._prompts) / max(self._num_examples, 1), 1.0)
        chosen = [int(i * spacing) for i in range(min(self._num_examples, len(self._prompts)))]
        return [
            Example(prompt.text, responses[0].text, prompt.ground_truth, responses[0].correct, responses[0].answer)
            for prompt, responses in ((self._prompts[i], by_prompt[i]) for i in chosen)
            if responses
        ]

    def pop_results(self) -> list[EvaluatedResponse]:
        """The responses of the last evaluation, in the order of requests; empty at a second call."""
        results, self._results = self._results, []
        return results

    def _of_sources(self, by_prompt: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, float]:
        """Share of the prompts with a scored response, their avg@k and mean length, for each of several sources."""
        of_prompts = zip(self._prompts, by_prompt, strict=True)
        found = by_label(((prompt, responses) for prompt, responses in of_prompts if responses), self._labels)
        num_prompts = sum(map(len, found.values()))
        metrics: dict[str, float] = {}
        for label, answered in found.items():
            everything = [scored for responses in answered for scored in responses]
            metrics[f"evaluation/share_{label}"] = len(answered) / num_prompts
            metrics[f"evaluation/response_length_mean_{label}"] = float(np.mean(lengths_of(everything)))
            if all(scored.correct is not None for scored in everything):
                shares = [np.mean([scored.correct for scored in responses]) for responses in answered]
                metrics[f"evaluation/avg_at_k_{label}"] = float(np.mean(shares))
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
        verdicts = [[bool(response.correct) for response in responses] for responses in by_prompt]
        correct = list(map(sum, verdicts))
        sizes = [len(responses) for responses in by_prompt]
        metrics["evaluation/avg_at_k"] = float(np.mean([c / n for c, n in zip(correct, sizes, strict=True)]))
        if self._scorer.reads_answers:
            answers = [[response.answer for response in responses] for responses in by_prompt]
            votes = map(count_votes, answers, verdicts)
            metrics["evaluation/maj_at_k"] = float(np.mean(list(map(maj_at_k, votes, sizes))))
        metrics["evaluation/pass_at_k"] = float(np.mean([c > 0 for c in correct]))
        curve = pass_at_each_k(sizes, correct, min(sizes)).mean(axis=1)
        for k in powers_of_two(min(sizes))[1:-1]:
            metrics[f"evaluation/pass_at_{k}"] = float(curve[k - 1])
        return metrics
