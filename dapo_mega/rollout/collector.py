"""Algorithm 1 of DAPO up to the buffer: samples, scores and filters groups until N are held.

`rollout.schedule` says when prompts are submitted. synchronous: in rounds, while a step waits for its groups. partial:
continuously, while a step waits, so that long responses delay no step. asynchronous: also between two steps' waits, as
the policy trains, weights are sent and the rest of a step is done (`feed`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dapo_mega.config import RunConfig
from dapo_mega.config.algorithm import OTHER_FILTERS
from dapo_mega.data.outcomes import GroupTally
from dapo_mega.data.sampler import PromptSampler
from dapo_mega.engines.protocol import RolloutEngine
from dapo_mega.errors import FleetError, InputError, StarvedError, StopRequested
from dapo_mega.metrics import Histogram
from dapo_mega.metrics.timeline import Activity
from dapo_mega.rollout.admission import Admission, Counts
from dapo_mega.rollout.buffer import GroupBuffer
from dapo_mega.rollout.collected import RolloutStats, group_metrics, scoring_metrics, warn_of_left_out
from dapo_mega.rollout.group_state import Arrays, pack_groups, settings_of_groups, unpack_groups
from dapo_mega.rollout.in_flight import CompleteGroup, GroupsInFlight, PendingGroup
from dapo_mega.rollout.latency import GroupLatency
from dapo_mega.rollout.scoring import ResponseScorer
from dapo_mega.rollout.sources import metrics_of_sources, source_labels
from dapo_mega.types import GenerationRequest, Group, GroupFate, Prompt, SamplingParams, ScoredTrajectory, Trajectory

_NUM_RECENT = 32


class Collector:
    """Owns the state that decides which groups come next: sampler, buffer, request ids and groups in flight.

    `feed` may run in a thread of its own while another one calls `collect` or `state`: they exclude each other but for
    the scoring of what `feed` found, for which nothing waits that does not need it.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        scorer: ResponseScorer,
        stop_token_ids: tuple[int, ...],
        activity: Activity | None = None,
    ) -> None:
        """`activity` notes when responses are scored. `recent` holds the responses that were scored last, kept or not;
        `pop_fates` says where groups went, and `left_over` how many groups were held and in flight when the last step
        had its own."""
        self._config = config
        self._admission = Admission.of(config)
        self._schedule = self._admission.schedule
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
        self._made_with = settings_of_groups(config, self._sampling)
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
        self.recent: deque[tuple[Prompt, Trajectory]] = deque(maxlen=_NUM_RECENT)
        self._last_scored: list[ScoredTrajectory] = []
        self._last_staleness: list[int] = []
        self._stats = self._last_stats = RolloutStats()
        self._fates: list[GroupFate] = []
        self._lock = threading.Condition()
        # Being scored beside training; scored so, and what could not be scored. The next step counts the latter two.
        self._being_scored: list[CompleteGroup] = []
        self._fed: list[Group] = []
        self._num_kept_of_fed = 0
        self._not_scored: list[CompleteGroup] = []
        self.left_over: dict[str, int] = {}
        self._in_flight = GroupsInFlight(engine)
        self._activity = activity or Activity()
        self._clock = self._activity.clock
        self._latency = GroupLatency(self._clock)
        self._beginning: tuple[Any, int, list[Group], list[Group]] = (self.sampler.state()[0], 0, [], [])

    def collect(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """N groups for one step with their metrics; `version` is the engines' weight version.

        Raises StarvedError with the acceptance rate when the allowed rounds did not yield N groups. Then, and when the
        engine or the scorer ends the run, the state goes back to the beginning of the step; where responses
        continue from step to step it keeps all requests and answers since then, and nothing of it is counted.
        """
        with self._lock:
            return self._collect_or_undo(version)

    def _collect_or_undo(self, version: int) -> tuple[list[Group], dict[str, float]]:
        self._beginning = self.sampler.state()[0], self.next_request_id, list(self.buffer.groups), self._fed
        stats = self._stats
        stats.begin(self._clock())
        try:
            return self._collect(version, stats)
        except (StopRequested, StarvedError, InputError, FleetError):
            self._undo(stats)
            raise
        finally:
            self._fates = [*self.buffer.pop_fates(), *self._in_flight.pop_fates(), *stats.unscored]
            self.left_over = {"in_buffer": len(self.buffer), "in_flight": self.num_in_flight()}
            self._stats, self._last_stats = RolloutStats(), stats

    def give_back(self) -> None:
        """Undo the last `collect`, whose groups cannot be trained on, as if it had not asked for them: a run that
        continues from `state` asks again. Not for samplers that need outcomes."""
        with self._lock:
            since = self._fed
            self._undo(self._last_stats)
            self._hold_fed(since)
            for group in self._last_stats.groups if self._schedule != "synchronous" else ():
                requests = self._requests([member.id for member in group.members], group.prompt)
                self._in_flight.put_back(PendingGroup(group.prompt, tuple(requests)))

    def _undo(self, stats: RolloutStats) -> None:
        """Restore the state before the last `collect`. Where responses continue from step to step, what was found since
        then is for the step that continues to count."""
        sampler, next_request_id, self.buffer.groups, fed = self._beginning
        if self._schedule == "synchronous":
            self._in_flight.cancel_all()
            self.next_request_id = next_request_id
            self.sampler.rewind(sampler)
            self._hold_fed(fed)
            return
        self._hold_fed(stats.groups)
        self._not_scored = [*((fate.prompt, list(fate.unscored)) for fate in stats.unscored), *self._not_scored]
        if "pending" in sampler:  # The outcomes of these groups.
            self.sampler.rewind({**self.sampler.state()[0], "pending": sampler["pending"]})

    def _collect(self, version: int, stats: RolloutStats) -> tuple[list[Group], dict[str, float]]:
        """One loop for all schedules.

        Groups that were started before come first: complete ones are held, and incomplete ones whose tokens are too old
        for this step are given up. Rounds leave nothing in flight.
        """
        config, in_flight = self._config, self._in_flight
        self._count_fed(version, stats)
        while self._being_scored and len(self.buffer) < config.batch.groups_per_step:
            self._lock.wait()
            self._count_fed(version, stats)
        stats.dropped_groups += in_flight.pop_dropped()
        if not self.feeds or len(self.buffer) < config.batch.groups_per_step:
            self._add_ended(in_flight.arrived(), version, stats)
        stats.expired_groups = in_flight.cancel_older_than(version - config.algorithm.max_staleness)
        in_flight.submit_missing()
        first_round = self._admission.first_round(len(self.buffer))
        while len(self.buffer) < config.batch.groups_per_step or self._admission.is_round_running(len(in_flight)):
            self._ask(self._admission.while_a_step_waits(self._counts(stats), first_round, version), stats)
            if not len(in_flight):
                raise StarvedError(self._starvation(stats))
            self._add_ended([in_flight.next_complete(), *in_flight.arrived()], version, stats)
        stats.seconds = self._clock() - (stats.started or 0.0)
        self.sampler.end_step()
        groups = list(self.buffer.take(config.batch.groups_per_step))
        self._last_scored, self._last_staleness = stats.scored, [version - group.weight_version for group in groups]
        metrics = self._metrics(stats, groups, version)
        self._latency.keep_only(self._first_request_ids())
        return groups, metrics

    def _first_request_ids(self) -> list[int]:
        """The first request of every group that is held or in flight."""
        held = [group.trajectories[0].id for group in (*self.buffer.groups, *self._fed)]
        not_scored = [trajectories[0].id for _, trajectories in (*self._being_scored, *self._not_scored)]
        return [*held, *not_scored, *self._in_flight.first_request_ids()]

    @property
    def feeds(self) -> bool:
        """Whether `feed` is to be called beside training."""
        return self._schedule == "asynchronous"

    def feed(self, version: int, *, engines_have_it: bool = False, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Between the waits of two steps, for the second one, which starts from weights of `version`: score the groups
        that are complete, and start new ones as long as none of their tokens can become too old. Does not wait for
        engines. What it finds is counted by the next step, or by that of a run that continues from `state`.

        `engines_have_it`: the engines have these weights already, so that what starts now is a step younger. Nothing is
        begun when `goes_on` says that the feeding is over. Raises as scoring does; then nothing is lost.
        """
        with self._lock:
            if not goes_on():
                return
            self._stats.begin(self._clock())
            complete = self._being_scored = self._in_flight.pop_complete()
        try:
            groups = self._score(complete, version)
            scored = [group for group in groups if group is not None]
            num_kept = sum(map(self.buffer.keeps, scored))
        except BaseException:
            with self._lock:
                self._put_back(complete)
                self._end_scoring()
            raise
        with self._lock:
            self._fed += scored
            self._num_kept_of_fed += num_kept
            self._not_scored += [c for c, group in zip(complete, groups, strict=True) if group is None]
            self._end_scoring()
            if not goes_on():
                return
            counts = self._counts(self._stats)
            num_prompts = self._admission.while_a_step_trains(counts, version, engines_have_it=engines_have_it)
            self._ask(num_prompts, self._stats)

    def _end_scoring(self) -> None:
        self._being_scored = []
        self._lock.notify_all()

    def _count_fed(self, version: int, stats: RolloutStats) -> None:
        """Count what was found beside training, and hold the groups that carry a signal and are not too old."""
        fed, not_scored = self._fed, self._not_scored
        self._hold_fed([])
        self._not_scored = []
        self._offer(fed, stats)
        stats.unscored.extend(_unscored(complete) for complete in not_scored)
        self.buffer.evict_stale(version)

    def _hold_fed(self, groups: Sequence[Group]) -> None:
        self._fed = list(groups)
        self._num_kept_of_fed = sum(map(self.buffer.keeps, groups))

    def _put_back(self, complete: Sequence[CompleteGroup]) -> None:
        """The groups are in flight again, as scoring them failed, or the run is to stop."""
        for group in complete:
            self._in_flight.put_back(self._with_requests(group))

    def _ask(self, num_prompts: int, stats: RolloutStats) -> None:
        for _ in range(num_prompts):
            (prompt,) = self._next_prompts(1)
            requests = self.new_requests(prompt)
            self._in_flight.start(prompt, requests)
            self._latency.start(requests[0].request_id)
            stats.asked_prompts += 1

    def _add_ended(self, ended: Sequence[CompleteGroup | None], version: int, stats: RolloutStats) -> None:
        """Score the complete groups and hold those that carry a signal and are not too old. None stands for a dropped
        group."""
        complete = [group for group in ended if group is not None]
        stats.dropped_groups += len(ended) - len(complete)
        try:
            scored = self._score(complete, version)
        except BaseException:
            self._put_back(complete)
            raise
        stats.unscored.extend(_unscored(c) for c, group in zip(complete, scored, strict=True) if group is None)
        self._offer([group for group in scored if group is not None], stats)
        self.buffer.evict_stale(version)

    def _offer(self, groups: Sequence[Group], stats: RolloutStats) -> None:
        """Count the groups, and hold those that carry a signal."""
        for group in groups:
            self.recent.extend((group.prompt, member) for member in group.trajectories)
            stats.scored.extend(group.trajectories)
            stats.greedy.extend([group.greedy] if group.greedy else [])
            stats.groups.append(group)
            self._observe(group)
            self.buffer.offer(group)

    def _counts(self, stats: RolloutStats) -> Counts:
        return Counts(
            asked=stats.asked_prompts,
            running=self._in_flight.num_running,
            in_flight=len(self._in_flight),
            held=len(self.buffer) + self._num_kept_of_fed + len(self._not_scored) + len(self._being_scored),
            kept_share=self.buffer.recent_kept_share(),
        )

    def pop_fates(self) -> list[GroupFate]:
        """Where the groups of the last `collect` went, also of one that failed: those for its step first, in their
        order. Empty at a second call."""
        fates, self._fates = self._fates, []
        return fates

    def num_in_flight(self) -> int:
        """Groups that the engines still work on, and those that are being scored beside training."""
        return len(self._in_flight) + len(self._being_scored)

    def histograms(self) -> dict[str, Histogram]:
        """Of the last `collect`: lengths and rewards of all responses that it scored, staleness of the groups that it
        returned."""
        found = {
            "rollout/response_length": Histogram.of_values([s.length for s in self._last_scored]),
            "rollout/reward": Histogram.of_values([s.reward for s in self._last_scored]),
            "buffer/staleness": Histogram.of_values(self._last_staleness),
        }
        return {name: histogram for name, histogram in found.items() if histogram is not None}

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON values and arrays for a checkpoint: the state that decides which groups come next."""
        with self._lock:
            return self._state()

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        records, arrays = pack_groups(self.buffer.groups, "buffer")
        fed, fed_arrays = pack_groups(self._fed, "fed")
        sampler, sampler_arrays = self.sampler.state()
        numbers = {"cursor": sampler, "next_request_id": self.next_request_id, "made_with": self._made_with}
        not_scored = [self._with_requests(group) for group in (*self._being_scored, *self._not_scored)]
        in_flight, in_flight_arrays = self._in_flight.state(not_scored)
        latency = self._latency.state(self._first_request_ids())
        values = {"collector": numbers, "buffer": records, "in_flight": in_flight, "group_seconds": latency}
        if fed:
            values, arrays = {**values, "fed": fed}, {**arrays, **fed_arrays}
        return values, {**arrays, **in_flight_arrays, **sampler_arrays}

    def load_state(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Continue from `state`, but for groups that other settings would not have made. Raises InputError for groups
        in flight if this run's schedule leaves none."""
        self.sampler.load_state(values["collector"]["cursor"], arrays)
        self.next_request_id = int(values["collector"]["next_request_id"])
        self.buffer.groups = unpack_groups(values["buffer"], arrays, self.prompts, "buffer")
        self._hold_fed(unpack_groups(values["fed"], arrays, self.prompts, "fed") if "fed" in values else [])
        self._latency.load_state(values.get("group_seconds", {}))  # Checkpoints of earlier versions lack it.
        made_with = values["collector"].get("made_with", {})  # Checkpoints of earlier versions lack it.
        changed = [name for name, value in self._made_with.items() if made_with.get(name, value) != value]
        self.buffer.groups = [g for g in self.buffer.groups if not changed and self._fits(g) and self.buffer.keeps(g)]
        self._hold_fed([group for group in self._fed if not changed and self._fits(group)])  # The next step filters.
        in_flight = values.get("in_flight") or []
        size = self._config.batch.group_size + self._has_greedy
        num_kept = len(self.buffer) + len(self._fed) + sum(len(record["request_ids"]) == size for record in in_flight)
        warn_of_left_out(len(values["buffer"]) + len(values.get("fed", [])) + len(in_flight), num_kept)
        if not in_flight:
            return
        if self._schedule == "synchronous":
            raise InputError(
                f"the checkpoint has {len(in_flight)} groups in flight, which only rollout.schedule=partial or "
                f"asynchronous can continue, and with algorithm.max_staleness of at least 1; set them, or start a new "
                f"run from the trained weights"
            )
        keeps_responses = not any(name.startswith("sampling.") for name in changed)
        self._in_flight.load_state(in_flight, arrays, self.prompts, self._requests, size, keeps_responses)

    def _fits(self, group: Group) -> bool:
        """Whether a held group is one that this run could have made."""
        longest = max(scored.length for scored in group.trajectories)
        is_of_size = len(group.trajectories) == self._config.batch.group_size and not (
            self._has_greedy and group.greedy is None
        )
        return is_of_size and longest <= self._config.rollout.max_response_tokens

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

    def _with_requests(self, complete: CompleteGroup) -> PendingGroup:
        prompt, trajectories = complete
        requests = self._requests([trajectory.id for trajectory in trajectories], prompt)
        return PendingGroup(prompt, tuple(requests), {trajectory.id: trajectory for trajectory in trajectories})

    def _score(self, complete: Sequence[CompleteGroup], version: int) -> list[Group | None]:
        """The groups with scored responses, None for one that could not be scored as a whole; `version` is that of the
        weights that the step starts from."""
        asked = [(prompt, trajectory) for prompt, trajectories in complete for trajectory in trajectories]
        with self._activity.scoring(len(asked)):
            results = iter(self._scorer.score(asked))
        groups: list[Group | None] = []
        for prompt, trajectories in complete:
            of_group = [next(results) for _ in trajectories]
            members = [scored for scored in of_group if isinstance(scored, ScoredTrajectory)]
            if len(members) < len(trajectories):
                groups.append(None)
                continue
            greedy = members.pop() if self._has_greedy else None
            members = self._scorer.compare(members, step=version + 1)
            groups.append(Group(prompt, tuple(members), min(t.weight_version for t in trajectories), greedy))
        return groups

    def _observe(self, group: Group) -> None:
        """Tell the sampler how the group came out. Raises InputError where that decides and nothing says it."""
        if not self._config.data.sampling.needs_outcomes:
            return
        passed = [self.buffer.passes(scored) for scored in group.trajectories]
        if None in passed:
            raise InputError(
                f"data.sampling.order=prioritised and data.sampling.retire_after need to know which responses are "
                f"correct, and the reward did not say so of every response; {OTHER_FILTERS}"
            )
        first = group.trajectories[0].id
        self.sampler.observe(GroupTally(first, group.prompt.index, sum(map(bool, passed)), len(passed)))

    def _starvation(self, stats: RolloutStats) -> str:
        counts, num_failed = self.buffer.counts, stats.dropped_groups + len(stats.unscored)
        return (
            f"dynamic sampling is starved: after {self._admission.num_rounds(stats.asked_prompts)} generation rounds "
            f"of up to {self._config.generation_groups} prompts only {len(self.buffer)} of "
            f"{self._config.batch.groups_per_step} groups are held; acceptance rate {counts.kept_share():.1%} "
            f"({self._outcomes()}, {num_failed} failed of {counts.offered + num_failed}). {self._advice()}"
        )

    def _advice(self) -> str:
        algorithm = self._config.algorithm
        if not algorithm.dynamic_sampling:
            return "Look for what made groups fail, or raise batch.generation_groups or algorithm.max_generation_rounds"
        by_correctness = algorithm.dynamic_sampling_on == "correctness"
        other = "algorithm.dynamic_sampling_on=unequal_scores if your rewards are graded, or " if by_correctness else ""
        return (
            "Use prompts of another difficulty, raise batch.group_size, batch.generation_groups or "
            f"algorithm.max_generation_rounds, or set {other}algorithm.dynamic_sampling=false"
        )

    def _outcomes(self) -> str:
        counts = self.buffer.counts
        if self._config.algorithm.dynamic_sampling_on == "unequal_scores":
            return f"{counts.offered - counts.kept} with equal scores"
        return f"{counts.all_right} all right, {counts.all_wrong} all wrong"

    def _metrics(self, stats: RolloutStats, groups: Sequence[Group], version: int) -> dict[str, float]:
        """Of a step that starts from weights of `version` and trains on `groups`."""
        return {
            "rollout/generation_rounds": float(self._admission.num_rounds(stats.asked_prompts)),
            "rollout/groups_in_flight": float(self.num_in_flight()),
            "buffer/size": float(len(self.buffer)),
            **self.sampler.metrics(),
            **metrics_of_sources(stats.groups, self._source_labels),
            **stats.metrics(),
            **scoring_metrics(self._scorer.pop_counts()),
            **group_metrics(groups, version, self.buffer.pop_counts()),
            **self._latency.metrics(groups),
        }


def _unscored(complete: CompleteGroup) -> GroupFate:
    prompt, trajectories = complete
    return GroupFate("dropped", prompt, unscored=tuple(trajectories))
