"""Algorithm 1 of DAPO up to the buffer: ask prompts, retry failures, score, filter, until N groups are held.

Prompts are asked in rounds, or with partial rollouts all the time, so that long responses hold no step up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dapo_mega.config import RunConfig
from dapo_mega.data import PromptCursor
from dapo_mega.engines.protocol import RolloutEngine, StreamingEngine
from dapo_mega.errors import InputError, StarvedError, StopRequested
from dapo_mega.rollout.buffer import GroupBuffer, most_offered
from dapo_mega.rollout.group_state import Arrays, pack_groups, unpack_groups
from dapo_mega.rollout.in_flight import CompleteGroup, GroupsInFlight
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.types import GenerationRequest, Group, Prompt, Response, SamplingParams, ScoredResponse

_NUM_RECENT = 32


@dataclass
class RolloutStats:
    """What one step generated, before filtering.

    A group that was asked for ends once: offered to the buffer when it is complete, `dropped` when no engine could
    serve a request of it, or `expired` when it still lacked responses and its tokens had become too old.
    """

    scored: list[ScoredResponse] = field(default_factory=list)
    rounds: int = 0
    retried: int = 0
    dropped_groups: int = 0
    expired_groups: int = 0
    seconds: float = 0.0


class Collector:
    """Owns everything that decides which groups come next: cursor, buffer, request numbers and groups in flight."""

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        scorer: ResponseScorer,
        stop_token_ids: tuple[int, ...],
        *,
        streaming_engine: StreamingEngine | None = None,
    ) -> None:
        """`streaming_engine` is `engine` itself where that answers requests one by one, as `rollout.partial` needs.

        `recent` are the responses that were scored last, kept or not.
        """
        assert streaming_engine is not None or not config.rollout.partial
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
        self.recent: deque[tuple[Prompt, Response]] = deque(maxlen=_NUM_RECENT)
        self._in_flight = None if streaming_engine is None else GroupsInFlight(streaming_engine)
        self._beginning: tuple[Any, int, list[Group]] = (self.cursor.state(), 0, [])

    def collect(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """N groups for one step with their metrics; `version` is that of the engine's weights.

        Raises StarvedError, naming the acceptance rate, when the allowed rounds did not yield N groups. When the engine
        raises StopRequested, `state` is afterwards what the step began with, or, with partial rollouts, all that has
        been asked and answered since.
        """
        self._beginning = self.cursor.state(), self.next_request_id, list(self.buffer.groups)
        try:
            return self._collect(version)
        except StopRequested:
            self._undo()
            raise

    def _undo(self) -> None:
        """Go back to before the last `collect`; with partial rollouts what was answered since is kept."""
        if self._config.rollout.partial:
            return
        if self._in_flight is not None:
            self._in_flight.cancel_all()
        cursor, self.next_request_id, self.buffer.groups = self._beginning
        self.cursor.load_state(cursor)

    def _collect(self, version: int) -> tuple[list[Group], dict[str, float]]:
        tally = RolloutStats()
        self.buffer.evict_stale(version)
        if self._config.rollout.partial:
            self._collect_continuously(version, tally)
        else:
            self._collect_in_rounds(tally)
        groups = list(self.buffer.take(self._config.batch.groups_per_step))
        return groups, {**self._rollout_metrics(tally), **self._group_metrics(groups, version)}

    def _collect_in_rounds(self, tally: RolloutStats) -> None:
        """Ask a round of prompts at a time, wait for all of its responses, and keep the surplus."""
        config = self._config
        while len(self.buffer) < config.batch.groups_per_step:
            if tally.rounds == config.algorithm.max_generation_rounds:
                raise StarvedError(self._starvation(tally))
            num_prompts = self._first_round() if tally.rounds == 0 else config.generation_groups
            tally.rounds += 1
            prompts = self._next_prompts(num_prompts)
            if self._in_flight is None:
                groups = self._generate(prompts, tally)
            else:
                groups = self._stream(self._in_flight, prompts, tally)
            for group in groups:
                self.buffer.offer(group)

    def _collect_continuously(self, version: int, tally: RolloutStats) -> None:
        """Partial rollouts: keep as many groups in flight as the first round would ask until N are held, and leave the
        rest in flight.

        What has arrived since the last step is read first. Then those groups are given up that have tokens too old for
        this step and still lack responses. A step asks no more prompts than its rounds would, and only while this step
        and the next one can use what comes of them (`_most_in_flight`).
        """
        config, in_flight = self._config, self._in_flight
        assert in_flight is not None
        started = time.perf_counter()
        self._take_in(in_flight.arrived(), version, tally)
        tally.expired_groups = in_flight.cancel_older_than(version - config.algorithm.max_staleness)
        in_flight.submit_missing()
        num_wanted = self._first_round()
        num_asked = 0
        while len(self.buffer) < config.batch.groups_per_step:
            allowed = config.algorithm.max_generation_rounds * config.generation_groups - num_asked
            missing = min(num_wanted, self._most_in_flight()) - len(in_flight)
            prompts = self._next_prompts(max(min(missing, allowed), 0))
            for prompt in prompts:
                in_flight.start(prompt, self._requests(prompt))
            num_asked += len(prompts)
            tally.rounds = -(-num_asked // config.generation_groups)
            if not len(in_flight):
                raise StarvedError(self._starvation(tally))
            self._take_in([in_flight.next_complete(), *in_flight.arrived()], version, tally)
        tally.seconds = time.perf_counter() - started

    def _take_in(self, ended: Sequence[CompleteGroup | None], version: int, tally: RolloutStats) -> None:
        """Score the groups that are complete and hold those that carry a signal and are not too old; None is a group
        that was given up."""
        complete = [group for group in ended if group is not None]
        tally.dropped_groups += len(ended) - len(complete)
        for group in self._score(complete, tally):
            self.buffer.offer(group)
        self.buffer.evict_stale(version)

    def _first_round(self) -> int:
        """Prompts of a step's first round: `generation_groups`, less in proportion to the surplus that the buffer
        already holds, so that surplus is used up instead of growing old."""
        config = self._config
        missing = max(config.batch.groups_per_step - len(self.buffer), 0)
        return -(-config.generation_groups * missing // config.batch.groups_per_step)

    def _most_in_flight(self) -> int:
        """Groups that may be in flight so that, whichever finish first, what this step leaves of them and of the buffer
        is no more than the next step takes: of what is left longer some would be complete and grow too old."""
        room = 2 * self._config.batch.groups_per_step - len(self.buffer)
        return most_offered(room, self.buffer.recent_kept_share())

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON values and arrays for a checkpoint: all that decides which groups come next."""
        records, arrays = pack_groups(self.buffer.groups)
        numbers = {"cursor": self.cursor.state(), "next_request_id": self.next_request_id}
        values = {"collector": numbers, "buffer": records}
        if self._in_flight is not None:
            values["in_flight"], in_flight_arrays = self._in_flight.state()
            arrays.update(in_flight_arrays)
        return values, arrays

    def load_state(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises InputError for groups in flight that this run would leave unanswered."""
        self.cursor.load_state(values["collector"]["cursor"])
        self.next_request_id = int(values["collector"]["next_request_id"])
        self.buffer.groups = unpack_groups(values["buffer"], arrays, self.prompts)
        in_flight = values.get("in_flight")
        if not in_flight:
            return
        if not self._config.rollout.partial:
            raise InputError(
                f"the checkpoint has {len(in_flight)} groups in flight, which only rollout.partial=true goes on with; "
                f"set it, or start a new run from the trained weights"
            )
        assert self._in_flight is not None
        self._in_flight.load_state(in_flight, arrays, self.prompts, self._request)

    def _next_prompts(self, num_prompts: int) -> list[Prompt]:
        return [self.prompts[i] for i in self.cursor.next(num_prompts)]

    def _requests(self, prompt: Prompt) -> list[GenerationRequest]:
        """The requests of one group, under new numbers."""
        first = self.next_request_id
        self.next_request_id += self._config.batch.group_size
        return [self._request(request_id, prompt) for request_id in range(first, self.next_request_id)]

    def _request(self, request_id: int, prompt: Prompt) -> GenerationRequest:
        # The seed names the request within the run, so a response depends on nothing else.
        seed = (self._config.seed << 64) | request_id
        return GenerationRequest(request_id, prompt.token_ids, seed, self._sampling)

    def _stream(self, in_flight: GroupsInFlight, prompts: Sequence[Prompt], tally: RolloutStats) -> list[Group]:
        """Groups of one round, in the order of `prompts`; each is scored while others are still generated."""
        started = time.perf_counter()
        for prompt in prompts:
            in_flight.start(prompt, self._requests(prompt))
        groups: list[Group] = []
        while len(in_flight):
            complete = in_flight.next_complete()
            tally.dropped_groups += complete is None
            groups += self._score([complete] if complete else [], tally)
        tally.seconds += time.perf_counter() - started
        return sorted(groups, key=lambda group: group.responses[0].response.request_id)

    def _generate(self, prompts: Sequence[Prompt], tally: RolloutStats) -> list[Group]:
        """Groups of one round, in the order of `prompts`; those with a response that kept failing are dropped."""
        requests = [request for prompt in prompts for request in self._requests(prompt)]
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
        complete: list[CompleteGroup] = []
        for i, prompt in enumerate(prompts):
            responses = [answers.get(request.request_id) for request in requests[i * size : (i + 1) * size]]
            present = [response for response in responses if response is not None]
            if len(present) == size:
                complete.append((prompt, present))
            else:
                tally.dropped_groups += 1
        return self._score(complete, tally)

    def _score(self, complete: Sequence[CompleteGroup], tally: RolloutStats) -> list[Group]:
        answered = [(prompt, r) for prompt, responses in complete for r in responses]
        self.recent.extend(answered)
        scored = self._scorer.score(answered)
        tally.scored.extend(scored)
        groups = []
        for i, (prompt, responses) in enumerate(complete):
            members = tuple(scored[i * len(responses) : (i + 1) * len(responses)])
            groups.append(Group(prompt, members, min(response.weight_version for response in responses)))
        return groups

    def _starvation(self, tally: RolloutStats) -> str:
        counts = self.buffer.counts
        return (
            f"dynamic sampling is starved: after {tally.rounds} generation rounds of up to "
            f"{self._config.generation_groups} prompts only {len(self.buffer)} of "
            f"{self._config.batch.groups_per_step} groups are held; acceptance rate {counts.kept_share():.1%} "
            f"({counts.all_right} all right, {counts.all_wrong} all wrong, {tally.dropped_groups} failed of "
            f"{counts.offered + tally.dropped_groups}). Use prompts of another difficulty, raise batch.group_size, "
            f"batch.generation_groups or algorithm.max_generation_rounds, or set algorithm.dynamic_sampling=false"
        )

    def _rollout_metrics(self, tally: RolloutStats) -> dict[str, float]:
        metrics = {
            "rollout/generation_rounds": float(tally.rounds),
            "rollout/dropped_groups": float(tally.dropped_groups),
        }
        if self._in_flight is None:
            metrics["rollout/retried_requests"] = float(tally.retried)
        else:
            metrics["rollout/groups_in_flight"] = float(len(self._in_flight))
            metrics["rollout/groups_expired_in_flight"] = float(tally.expired_groups)
        outcomes = self._scorer.pop_outcomes()
        for outcome in ("no_answer", "timeout", "crash", "refused"):
            metrics[f"reward/num_{outcome}"] = float(outcomes[outcome])
        if not tally.scored:
            return metrics
        # In the order of requests, whichever finished first: sums of floats depend on it.
        scored = sorted(tally.scored, key=lambda s: s.response.request_id)
        lengths = np.array([len(s.response.token_ids) for s in scored])
        logprobs = np.concatenate([s.response.logprobs for s in scored])
        return {
            **metrics,
            "rollout/reward_mean": float(np.mean([s.reward for s in scored])),
            "rollout/accuracy_reward_mean": float(np.mean([s.accuracy_reward for s in scored])),
            "rollout/accuracy_mean": float(np.mean([s.correct for s in scored])),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_share": float(np.mean([s.response.finish_reason == "length" for s in scored])),
            "rollout/partial_share": float(np.mean([len(s.response.version_spans) > 1 for s in scored])),
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
