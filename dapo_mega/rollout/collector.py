"""Algorithm 1 of DAPO up to the buffer: samples, scores and filters groups until N are held.

Prompts are submitted in rounds. With partial rollouts they are submitted continuously, so that long responses delay no
step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dapo_mega.config import RunConfig
from dapo_mega.config.algorithm import OTHER_FILTERS
from dapo_mega.data.outcomes import GroupTally
from dapo_mega.data.sampler import PromptSampler
from dapo_mega.engines.protocol import RolloutEngine
from dapo_mega.errors import InputError, StarvedError, StopRequested
from dapo_mega.metrics import Histogram
from dapo_mega.rollout.buffer import GroupBuffer, max_offered
from dapo_mega.rollout.group_state import Arrays, pack_groups, unpack_groups
from dapo_mega.rollout.in_flight import CompleteGroup, GroupsInFlight
from dapo_mega.rollout.scoring import ResponseScorer, parts_of
from dapo_mega.rollout.sources import metrics_of_sources, source_labels
from dapo_mega.types import GenerationRequest, Group, GroupFate, Prompt, Response, SamplingParams, ScoredResponse

_NUM_RECENT = 32


@dataclass
class RolloutStats:
    """What one step generated, before filtering.

    Every group ends in one of four ways. Complete groups are offered to the buffer. A group is `dropped` when one of
    its requests failed, `unscored` when one of its responses could not be scored, and `expired` when its tokens became
    too old before it was complete.
    """

    groups: list[Group] = field(default_factory=list)
    scored: list[ScoredResponse] = field(default_factory=list)
    greedy: list[ScoredResponse] = field(default_factory=list)
    asked_prompts: int = 0
    dropped_groups: int = 0
    unscored: list[GroupFate] = field(default_factory=list)
    expired_groups: int = 0
    seconds: float = 0.0


class Collector:
    """Owns the state that decides which groups come next: sampler, buffer, request ids and groups in flight."""

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        scorer: ResponseScorer,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        """`recent` holds the responses that were scored last, kept or not; `pop_fates` says where groups went."""
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
        self._greedy_sampling = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0)
        self._has_greedy = config.algorithm.advantage == "greedy_baseline"
        self.sampler = PromptSampler(
            prompts, config.data.sampling, config.seed, config.data.weights, config.batch.groups_per_step
        )
        self._source_labels = source_labels(prompts)
        self.buffer = GroupBuffer(
            config.algorithm.dynamic_sampling,
            config.algorithm.max_staleness,
            config.algorithm.dynamic_sampling_on,
            config.algorithm.score_threshold,
        )
        self.next_request_id = 0
        self.recent: deque[tuple[Prompt, Response]] = deque(maxlen=_NUM_RECENT)
        self._last_scored: list[ScoredResponse] = []
        self._last_staleness: list[int] = []
        self._unscored: list[GroupFate] = []
        self._in_flight = GroupsInFlight(engine)
        self._beginning: tuple[Any, int, list[Group]] = (self.sampler.state()[0], 0, [])

    def collect(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """N groups for one step with their metrics; `version` is the engines' weight version.

        Raises StarvedError with the acceptance rate when the allowed rounds did not yield N groups. When the engine or
        the scorer raises StopRequested, the state goes back to the beginning of the step; with partial rollouts it
        keeps all requests and answers since then.
        """
        self._beginning = self.sampler.state()[0], self.next_request_id, list(self.buffer.groups)
        self.pop_fates()  # Nobody asked for those of the step before.
        try:
            return self._collect(version)
        except StopRequested:
            self._undo()
            raise

    def _undo(self) -> None:
        """Restore the state before the last `collect`; with partial rollouts keep the new answers."""
        if self._config.rollout.partial:
            return
        self._in_flight.cancel_all()
        sampler, self.next_request_id, self.buffer.groups = self._beginning
        self.sampler.rewind(sampler)

    def _collect(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """One loop for complete rounds and for partial rollouts.

        Groups that partial rollouts left in flight come first: complete ones are held, and incomplete ones whose tokens
        are too old for this step are given up. Rounds leave nothing in flight.
        """
        config, in_flight = self._config, self._in_flight
        stats = RolloutStats(unscored=self._unscored)
        started = time.perf_counter()
        self._add_ended(in_flight.arrived(), version, stats)
        stats.expired_groups = in_flight.cancel_older_than(version - config.algorithm.max_staleness)
        in_flight.submit_missing()
        first_round = self._first_round()
        while len(self.buffer) < config.batch.groups_per_step or self._round_is_running():
            for prompt in self._next_prompts(self._num_to_ask(first_round, stats)):
                in_flight.start(prompt, self.new_requests(prompt))
                stats.asked_prompts += 1
            if not len(in_flight):
                raise StarvedError(self._starvation(stats))
            self._add_ended([in_flight.next_complete(), *in_flight.arrived()], version, stats)
        stats.seconds = time.perf_counter() - started
        self.sampler.end_step()
        groups = list(self.buffer.take(config.batch.groups_per_step))
        self._last_scored, self._last_staleness = stats.scored, [version - group.weight_version for group in groups]
        return groups, {**self._rollout_metrics(stats), **self._group_metrics(groups, version)}

    def _add_ended(self, ended: Sequence[CompleteGroup | None], version: int, stats: RolloutStats) -> None:
        """Score the complete groups and hold those that carry a signal and are not too old. None stands for a dropped
        group. When the run is to stop while they are scored, they are still in flight."""
        complete = [group for group in ended if group is not None]
        stats.dropped_groups += len(ended) - len(complete)
        try:
            scored = self._score(complete, version, stats)
        except StopRequested:
            for prompt, responses in complete:
                self._in_flight.put_back(self._requests([r.request_id for r in responses], prompt), prompt, responses)
            raise
        for group in scored:
            self.buffer.offer(group)
        self.buffer.evict_stale(version)

    def _round_is_running(self) -> bool:
        return not self._config.rollout.partial and len(self._in_flight) > 0

    def _num_to_ask(self, first_round: int, stats: RolloutStats) -> int:
        """The number of prompts to submit now, in a step whose first round has `first_round` prompts.

        Rounds: a whole round when none is running. Partial rollouts: enough to keep `first_round` groups in flight, but
        at most what this step and the next one can use (`_max_in_flight`). A step submits at most as many prompts as
        `max_generation_rounds` rounds.
        """
        config = self._config
        max_rounds = config.algorithm.max_generation_rounds
        if config.rollout.partial:
            missing = min(first_round, self._max_in_flight()) - len(self._in_flight)
            return max(0, min(missing, max_rounds * config.generation_groups - stats.asked_prompts))
        if self._round_is_running() or self._num_rounds(stats) == max_rounds:
            return 0
        return config.generation_groups if stats.asked_prompts else first_round

    def _num_rounds(self, stats: RolloutStats) -> int:
        """The rounds that the submitted prompts fill, rounded up."""
        return -(-stats.asked_prompts // self._config.generation_groups)

    def _first_round(self) -> int:
        """Prompts of a step's first round: `generation_groups` times the share of the step's groups that the buffer
        lacks, so that surplus groups are used before they grow old."""
        config = self._config
        missing = max(config.batch.groups_per_step - len(self.buffer), 0)
        return -(-config.generation_groups * missing // config.batch.groups_per_step)

    def pop_fates(self) -> list[GroupFate]:
        """Where the groups of the last `collect` went, also of one that failed: those for its step first, in their
        order. Empty at a second call."""
        unscored, self._unscored = self._unscored, []
        return [*self.buffer.pop_fates(), *self._in_flight.pop_fates(), *unscored]

    def num_in_flight(self) -> int:
        """Groups that the engines still work on."""
        return len(self._in_flight)

    def _max_in_flight(self) -> int:
        """The most groups in flight such that this step leaves, in flight and in the buffer, at most what the next step
        takes. Groups left longer could be complete and grow too old."""
        room = 2 * self._config.batch.groups_per_step - len(self.buffer)
        return max_offered(room, self.buffer.recent_kept_share())

    def histograms(self) -> dict[str, Histogram]:
        """Of the last `collect`: lengths and rewards of all responses that it scored, staleness of the groups that it
        returned."""
        found = {
            "rollout/response_length": Histogram.of_values([len(s.response.token_ids) for s in self._last_scored]),
            "rollout/reward": Histogram.of_values([s.reward for s in self._last_scored]),
            "buffer/staleness": Histogram.of_values(self._last_staleness),
        }
        return {name: histogram for name, histogram in found.items() if histogram is not None}

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON values and arrays for a checkpoint: the state that decides which groups come next."""
        records, arrays = pack_groups(self.buffer.groups)
        sampler, sampler_arrays = self.sampler.state()
        numbers = {"cursor": sampler, "next_request_id": self.next_request_id}
        in_flight, in_flight_arrays = self._in_flight.state()
        values = {"collector": numbers, "buffer": records, "in_flight": in_flight}
        return values, {**arrays, **in_flight_arrays, **sampler_arrays}

    def load_state(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises InputError for groups in flight if this run has no partial rollouts."""
        self.sampler.load_state(values["collector"]["cursor"], arrays)
        self.next_request_id = int(values["collector"]["next_request_id"])
        self.buffer.groups = unpack_groups(values["buffer"], arrays, self.prompts)
        if self._has_greedy and any(group.greedy is None for group in self.buffer.groups):
            raise InputError(
                "the checkpoint's buffer has groups without a greedy response, which algorithm.advantage="
                "greedy_baseline needs; resume with the algorithm of the checkpoint, or start a new run from the "
                "trained weights"
            )
        in_flight = values.get("in_flight")
        if not in_flight:
            return
        if not self._config.rollout.partial:
            raise InputError(
                f"the checkpoint has {len(in_flight)} groups in flight, which only rollout.partial=true can continue; "
                f"set it, or start a new run from the trained weights"
            )
        self._in_flight.load_state(in_flight, arrays, self.prompts, self._requests)

    def _next_prompts(self, num_prompts: int) -> list[Prompt]:
        return [self.prompts[i] for i in self.sampler.next(num_prompts)]

    def new_requests(self, prompt: Prompt) -> list[GenerationRequest]:
        """The requests of one group, with new ids."""
        first = self.next_request_id
        self.next_request_id += self._config.batch.group_size + self._has_greedy
        return self._requests(range(first, self.next_request_id), prompt)

    def _requests(self, request_ids: Sequence[int], prompt: Prompt) -> list[GenerationRequest]:
        """The requests of one group; the last is greedy where the algorithm has a greedy baseline."""
        requests = []
        for position, request_id in enumerate(request_ids):
            is_greedy = self._has_greedy and position == len(request_ids) - 1
            # The seed depends only on the run's seed and the request id, so responses do not depend on timing.
            seed = (self._config.seed << 64) | request_id
            sampling = self._greedy_sampling if is_greedy else self._sampling
            requests.append(GenerationRequest(request_id, prompt.token_ids, seed, sampling))
        return requests

    def _score(self, complete: Sequence[CompleteGroup], version: int, stats: RolloutStats) -> list[Group]:
        """Groups of scored responses, without those that could not be scored as a whole; `version` is that of the
        weights that the step starts from."""
        results = iter(self._scorer.score([(prompt, r) for prompt, responses in complete for r in responses]))
        groups = []
        for prompt, responses in complete:
            of_group = [next(results) for _ in responses]
            members = [scored for scored in of_group if isinstance(scored, ScoredResponse)]
            if len(members) < len(responses):
                stats.unscored.append(GroupFate("dropped", prompt, unscored=tuple(responses)))
                continue
            greedy = members.pop() if self._has_greedy else None
            members = self._scorer.compare(members, step=version + 1)
            self.recent.extend((prompt, member.response) for member in members)
            stats.scored.extend(members)
            stats.greedy.extend([greedy] if greedy else [])
            group = Group(prompt, tuple(members), min(r.weight_version for r in responses), greedy)
            self._observe(group)
            groups.append(group)
        stats.groups.extend(groups)
        return groups

    def _observe(self, group: Group) -> None:
        """Tell the sampler how the group came out. Raises InputError where that decides and nothing says it."""
        if not self._config.data.sampling.needs_outcomes:
            return
        passed = [self.buffer.passes(scored) for scored in group.responses]
        if None in passed:
            raise InputError(
                f"data.sampling.order=prioritised and data.sampling.retire_after need to know which responses are "
                f"correct, and the reward did not say so of every response; {OTHER_FILTERS}"
            )
        first = group.responses[0].response.request_id
        self.sampler.observe(GroupTally(first, group.prompt.index, sum(map(bool, passed)), len(passed)))

    def _starvation(self, stats: RolloutStats) -> str:
        counts, num_failed = self.buffer.counts, stats.dropped_groups + len(stats.unscored)
        return (
            f"dynamic sampling is starved: after {self._num_rounds(stats)} generation rounds of up to "
            f"{self._config.generation_groups} prompts only {len(self.buffer)} of "
            f"{self._config.batch.groups_per_step} groups are held; acceptance rate {counts.kept_share():.1%} "
            f"({self._outcomes()}, {num_failed} failed of {counts.offered + num_failed}). Use prompts of another "
            f"difficulty, raise batch.group_size, batch.generation_groups or algorithm.max_generation_rounds, or set "
            f"algorithm.dynamic_sampling=false"
        )

    def _outcomes(self) -> str:
        counts = self.buffer.counts
        if self._config.algorithm.dynamic_sampling_on == "unequal_scores":
            return f"{counts.offered - counts.kept} with equal scores"
        return f"{counts.all_right} all right, {counts.all_wrong} all wrong"

    def _rollout_metrics(self, stats: RolloutStats) -> dict[str, float]:
        metrics = {
            "rollout/generation_rounds": float(self._num_rounds(stats)),
            "rollout/dropped_groups": float(stats.dropped_groups),
            "rollout/unscored_groups": float(len(stats.unscored)),
            "rollout/groups_in_flight": float(len(self._in_flight)),
            "rollout/groups_expired_in_flight": float(stats.expired_groups),
            **self.sampler.metrics(),
            **metrics_of_sources(stats.groups, self._source_labels),
        }
        difficulties = [g.prompt.difficulty for g in stats.groups if g.prompt.difficulty is not None]
        if difficulties:
            metrics["sampling/difficulty_mean"] = float(np.mean(sorted(difficulties)))
        counts = self._scorer.pop_counts()
        for outcome in ("no_answer", "timeout", "crash", "refused"):
            metrics[f"reward/num_{outcome}"] = float(counts.outcomes[outcome])
        metrics["reward/num_failed"] = float(counts.failed)
        metrics["reward/failed_share"] = counts.failed / max(counts.asked, 1)
        if stats.greedy:
            metrics["rollout/greedy_reward_mean"] = float(np.mean([s.reward for s in stats.greedy]))
        if not stats.scored:
            return metrics
        # In the order of requests, because sums of floats depend on the order.
        scored = sorted(stats.scored, key=lambda s: s.response.request_id)
        lengths = np.array([len(s.response.token_ids) for s in scored])
        logprobs = np.concatenate([s.response.logprobs for s in scored])
        num_tokens = lengths.sum() + sum(len(s.response.token_ids) for s in stats.greedy)
        verdicts = [s.correct for s in scored if s.correct is not None]
        if verdicts:
            metrics["rollout/accuracy_mean"] = float(np.mean(verdicts))
        for name, values in parts_of(scored).items():
            metrics[f"reward/part_{name}"] = float(np.mean(values))
        return {
            **metrics,
            "rollout/reward_mean": float(np.mean([s.reward for s in scored])),
            "rollout/accuracy_reward_mean": float(np.mean([s.accuracy_reward for s in scored])),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_share": float(np.mean([s.response.finish_reason == "length" for s in scored])),
            "rollout/partial_share": float(np.mean([len(s.response.version_spans) > 1 for s in scored])),
            "rollout/mean_token_probability": float(np.exp(logprobs.astype(np.float64)).mean()),
            "rollout/tokens": float(num_tokens),
            "rollout/tokens_per_s": float(num_tokens / max(stats.seconds, 1e-9)),
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
        if counts.judged:
            metrics["groups/all_right_share"] = counts.all_right / counts.judged
            metrics["groups/all_wrong_share"] = counts.all_wrong / counts.judged
        return metrics
