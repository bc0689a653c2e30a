"""Algorithm 1 of DAPO up to the buffer: ask prompts, retry failures, score, filter, until N groups are held."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dapo_mega.buffer import GroupBuffer
from dapo_mega.config import RunConfig
from dapo_mega.data import PromptCursor
from dapo_mega.errors import StarvedError
from dapo_mega.rollout.engine import RolloutEngine
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.types import GenerationRequest, Group, Prompt, Response, SamplingParams, ScoredResponse

# Probes are numbered apart from the run's requests, so that they decide nothing.
_FIRST_PROBE_ID = 1 << 61


@dataclass
class RolloutTally:
    """What one step generated, before filtering."""

    scored: list[ScoredResponse] = field(default_factory=list)
    rounds: int = 0
    retried: int = 0
    dropped_groups: int = 0
    seconds: float = 0.0


class Collector:
    """Owns everything that decides which groups come next: cursor, buffer and request numbers."""

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        scorer: ResponseScorer,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self.prompts = prompts
        self._engine = engine
        self._scorer = scorer
        self._sampling = SamplingParams(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_new_tokens=config.rollout.max_response_tokens,
            stop_token_ids=stop_token_ids,
        )
        self.cursor = PromptCursor(len(prompts), config.seed)
        self.buffer = GroupBuffer(config.algorithm.dynamic_sampling, config.algorithm.max_staleness)
        self.next_request_id = 0

    def collect(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """N groups for one step with their metrics; `version` is that of the engine's weights.

        Raises StarvedError, naming the acceptance rate, when the allowed rounds did not yield N groups.
        """
        config = self._config
        tally = RolloutTally()
        self.buffer.evict_stale(version)
        while len(self.buffer) < config.batch.groups_per_step:
            if tally.rounds == config.algorithm.max_generation_rounds:
                raise StarvedError(self._starvation(tally))
            num_prompts = self._first_round() if tally.rounds == 0 else config.generation_groups
            tally.rounds += 1
            prompts = [self.prompts[i] for i in self.cursor.next(num_prompts)]
            for group in self._generate(prompts, tally):
                self.buffer.offer(group)
        groups = list(self.buffer.take(config.batch.groups_per_step))
        return groups, {**self._rollout_metrics(tally), **self._group_metrics(groups, version)}

    def _first_round(self) -> int:
        """Prompts of a step's first round: `generation_groups`, less in proportion to the surplus that the buffer
        already holds, so that surplus is used up instead of growing old."""
        config = self._config
        missing = config.batch.groups_per_step - len(self.buffer)
        return -(-config.generation_groups * missing // config.batch.groups_per_step)

    def probe(self, version: int) -> list[Response]:
        """One response to the first prompt, outside the run's request numbers; none when the engine failed."""
        request_id = _FIRST_PROBE_ID + version
        seed = (self._config.seed << 64) | request_id
        request = GenerationRequest(request_id, self.prompts[0].token_ids, seed, self._sampling)
        return [answer for answer in self._engine.generate([request]) if isinstance(answer, Response)]

    def state(self) -> dict[str, Any]:
        """Plain numbers that, with the buffer's groups, continue the run exactly."""
        return {"cursor": self.cursor.state(), "next_request_id": self.next_request_id}

    def load_state(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.cursor.load_state(state["cursor"])
        self.next_request_id = int(state["next_request_id"])
        self.buffer.groups = list(groups)

    def _requests(self, prompts: Sequence[Prompt]) -> Iterator[GenerationRequest]:
        for prompt in prompts:
            for _ in range(self._config.batch.group_size):
                # The seed names the request within the run, so a response depends on nothing else.
                seed = (self._config.seed << 64) | self.next_request_id
                yield GenerationRequest(self.next_request_id, prompt.token_ids, seed, self._sampling)
                self.next_request_id += 1

    def _generate(self, prompts: Sequence[Prompt], tally: RolloutTally) -> list[Group]:
        """Groups of one round, in the order of `prompts`; those with a response that kept failing are dropped."""
        requests = list(self._requests(prompts))
        started = time.perf_counter()
        answers: dict[int, Response] = {}
        pending = requests
        for attempt in range(self._config.rollout.max_attempts):
            tally.retried += len(pending) if attempt else 0
            answered = [r for r in self._engine.generate(pending) if isinstance(r, Response)]
            answers.update((response.request_id, response) for response in answered)
            pending = [request for request in pending if request.request_id not in answers]
            if not pending:
                break
        tally.seconds += time.perf_counter() - started
        size = self._config.batch.group_size
        complete: list[tuple[Prompt, list[Response]]] = []
        for i, prompt in enumerate(prompts):
            responses = [answers.get(request.request_id) for request in requests[i * size : (i + 1) * size]]
            present = [response for response in responses if response is not None]
            if len(present) == size:
                complete.append((prompt, present))
            else:
                tally.dropped_groups += 1
        return self._score(complete, tally)

    def _score(self, complete: Sequence[tuple[Prompt, list[Response]]], tally: RolloutTally) -> list[Group]:
        scored = self._scorer.score([(prompt, r) for prompt, responses in complete for r in responses])
        tally.scored.extend(scored)
        groups = []
        for i, (prompt, responses) in enumerate(complete):
            members = tuple(scored[i * len(responses) : (i + 1) * len(responses)])
            groups.append(Group(prompt, members, min(response.weight_version for response in responses)))
        return groups

    def _starvation(self, tally: RolloutTally) -> str:
        counts = self.buffer.counts
        return (
            f"dynamic sampling is starved: after {tally.rounds} generation rounds of up to "
            f"{self._config.generation_groups} prompts only {len(self.buffer)} of "
            f"{self._config.batch.groups_per_step} groups are held; acceptance rate {counts.kept_share():.1%} "
            f"({counts.all_right} all right, {counts.all_wrong} all wrong, {tally.dropped_groups} failed of "
            f"{counts.offered + tally.dropped_groups}). Use prompts of another difficulty, raise batch.group_size, "
            f"batch.generation_groups or algorithm.max_generation_rounds, or set algorithm.dynamic_sampling=false"
        )

    def _rollout_metrics(self, tally: RolloutTally) -> dict[str, float]:
        metrics = {
            "rollout/generation_rounds": float(tally.rounds),
            "rollout/retried_requests": float(tally.retried),
            "rollout/dropped_groups": float(tally.dropped_groups),
        }
        outcomes = self._scorer.pop_outcomes()
        for outcome in ("no_answer", "timeout", "crash", "refused"):
            metrics[f"reward/num_{outcome}"] = float(outcomes[outcome])
        if not tally.scored:
            return metrics
        lengths = np.array([len(s.response.token_ids) for s in tally.scored])
        logprobs = np.concatenate([s.response.logprobs for s in tally.scored])
        return {
            **metrics,
            "rollout/reward_mean": float(np.mean([s.reward for s in tally.scored])),
            "rollout/accuracy_reward_mean": float(np.mean([s.accuracy_reward for s in tally.scored])),
            "rollout/accuracy_mean": float(np.mean([s.correct for s in tally.scored])),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_share": float(np.mean([s.response.finish_reason == "length" for s in tally.scored])),
            "rollout/mean_token_probability": float(np.exp(logprobs.astype(np.float64)).mean()),
            "rollout/tokens": float(lengths.sum()),
            "rollout/tokens_per_s": float(lengths.sum() / max(tally.seconds, 1e-9)),
        }

    def _group_metrics(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        counts = self.buffer.pop_counts()
        staleness = [version - group.weight_version for group in groups]
        metrics = {
            "buffer/size": float(len(self.buffer)),
            "buffer/staleness_mean": float(np.mean(staleness)),
            "buffer/staleness_max": float(np.max(staleness)),
            "buffer/stale_dropped": float(counts.stale),
            "groups/offered": float(counts.offered),
        }
        if counts.offered:
            metrics["groups/kept_share"] = counts.kept_share()
            metrics["groups/all_right_share"] = counts.all_right / counts.offered
            metrics["groups/all_wrong_share"] = counts.all_wrong / counts.offered
        return metrics
