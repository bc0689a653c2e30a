"""Algorithm 1 of DAPO up to the buffer: samples, scores and filters groups until N are held.

A group is a task (`groups.py`): its trajectories await the engine, then it awaits its scores, then it is found. A step
waits for found groups, counts them, and asks for more as `admission.py` says. Groups wait for engines and for scoring
alone, never for a step; a step waits for groups alone. So what is asked while a step trains (the asynchronous schedule)
needs nobody to look after it: each group that is found asks for the next.

Invariants:

- Everything runs on the engines' event loop, and between two awaits nothing else does. Only scoring is beside it.
- A group is in one place: open (`_open`), found and not counted (`_found`), or counted by one step, which holds it in
  the buffer, trains on it or says where it went. A step in which nothing is trained on has counted nothing: `state` is
  then that of its beginning, and where responses continue from step to step with all that came since.
- No engine's place waits for scoring: what is being scored counts as held, not as running.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dapo_mega.algorithms.filters import OTHER_FILTERS
from dapo_mega.config import RunConfig
from dapo_mega.data.outcomes import GroupTally
from dapo_mega.data.sampler import PromptSampler
from dapo_mega.engines.protocol import RolloutEngine
from dapo_mega.environments.base import SINGLE_TURN, Environment
from dapo_mega.errors import InputError, StarvedError
from dapo_mega.metrics import Histogram
from dapo_mega.metrics.timeline import Activity
from dapo_mega.rollout.admission import Admission, Counts
from dapo_mega.rollout.asking import numbered
from dapo_mega.rollout.buffer import GroupBuffer
from dapo_mega.rollout.collected import RolloutStats, group_metrics, scoring_metrics
from dapo_mega.rollout.group_state import Arrays, pack_groups, settings_of_groups, unpack_groups
from dapo_mega.rollout.groups import OpenGroup, pack_open, unpack_open
from dapo_mega.rollout.latency import GroupLatency
from dapo_mega.rollout.scoring import ResponseScorer, ScoringQueue, lengths_of
from dapo_mega.rollout.sources import metrics_of_sources, source_labels
from dapo_mega.types import (
    GenerationFailure,
    GenerationRequest,
    Group,
    GroupFate,
    Prompt,
    SamplingParams,
    ScoredTrajectory,
    Trajectory,
)

logger = logging.getLogger(__name__)

_NUM_RECENT = 32
_SLOW_SCORING_S = 0.2


@dataclass(frozen=True)
class _Beginning:
    """What a step started from."""

    sampler: dict[str, Any]
    next_request_id: int
    held: list[Group]
    found: list[OpenGroup]


class Collector:
    """Owns the state that decides which groups come next: sampler, buffer, request ids and open groups.

    All methods but the constructor and `load_state` are for the engines' event loop; what `collect` leaves for the
    records (`pop_fates`, `recent`, `left_over`, `histograms`) changes in a step only.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Sequence[Prompt],
        engine: RolloutEngine,
        scorer: ResponseScorer,
        stop_token_ids: tuple[int, ...],
        activity: Activity | None = None,
        environment: Environment = SINGLE_TURN,
        num_tokens: int | None = None,
    ) -> None:
        """`activity` notes when responses are scored. `recent` holds the responses that were scored last, kept or not;
        `pop_fates` says where groups went, and `left_over` how many groups were held and in flight when the last step
        had its own."""
        self._config = config
        self._admission = Admission.of(config)
        self._schedule = self._admission.schedule
        self._asks_ahead = self._schedule == "asynchronous"
        self.prompts = prompts
        self._engine = engine
        self._environment = environment
        self._scorer = scorer
        self._sampling = SamplingParams(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_new_tokens=config.rollout.max_response_tokens,
            stop_token_ids=stop_token_ids,
            num_tokens=num_tokens,
            stop=config.rollout.stop,
        )
        self._greedy_sampling = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0)
        self._has_greedy = config.algorithm.advantage.has_greedy
        self._made_with = settings_of_groups(config, self._sampling)
        self.sampler = PromptSampler(
            prompts, config.data.sampling, config.seed, config.data.weights, config.batch.groups_per_step
        )
        self._source_labels = source_labels(prompts)
        self.buffer = GroupBuffer(
            config.algorithm.dynamic_sampling, config.algorithm.max_staleness, config.algorithm.dynamic_sampling_on
        )
        self.next_request_id = 0
        self.recent: deque[tuple[Prompt, Trajectory]] = deque(maxlen=_NUM_RECENT)
        self.histograms: dict[str, Histogram] = {}
        self._stats = RolloutStats()
        self._fates: list[GroupFate] = []
        self.left_over: dict[str, int] = {}
        activity = activity or Activity()
        self._clock = activity.clock
        self._latency = GroupLatency(self._clock)
        self._queue = ScoringQueue(scorer, activity)
        # Open groups by id, of which so many lack trajectories; found ones, of which so many count as held.
        self._open: dict[int, OpenGroup] = {}
        self._num_running = 0
        self._found: list[OpenGroup] = []
        self._num_kept_of_found = 0
        # Of the step under way, or the last one: what it started from, what it counted, and if that does not count.
        self._beginning: _Beginning
        self._counted: list[OpenGroup] = []
        self._counts_nothing = self._is_given_back = False
        self._version = 0
        self._engines_have_weights = False
        self._is_training = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    async def collect(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """N groups for the step that starts from weights of `version`, which the engines have, and its metrics.

        Raises StarvedError with the acceptance rate when the allowed rounds did not yield N groups. Then, and when it
        is cancelled or scoring ends the run, the step counts nothing.
        """
        stats = self._stats
        stats.begin(self._clock())
        self._beginning = _Beginning(
            self.sampler.state()[0], self.next_request_id, list(self.buffer.groups), list(self._found)
        )
        self._version, self._is_training, self._counts_nothing, self._counted = version, False, True, []
        try:
            await self._fill_buffer(stats)
            stats.seconds = self._clock() - (stats.started or 0.0)
            self.sampler.end_step()
            groups = list(self.buffer.take(self._config.batch.groups_per_step))
            self.histograms = stats.histograms(groups, version)
            metrics = self._metrics(stats, groups)
            self._latency.keep_only(_ids(self.buffer.groups, self._found, self._open.values()))
        except (StarvedError, InputError, asyncio.CancelledError):
            if self._schedule == "synchronous":
                self._give_up(list(self._open.values()))
            raise
        finally:
            self._fates = [*self.buffer.pop_fates(), *stats.given_up, *stats.unscored]
            self.left_over = {"in_buffer": len(self.buffer), "in_flight": len(self._open)}
            self._stats = RolloutStats()
        self._version, self._counts_nothing = version + 1, False
        self._is_training, self._engines_have_weights = self._asks_ahead, False
        self._ask_ahead()
        return groups, metrics

    async def _fill_buffer(self, stats: RolloutStats) -> None:
        """One loop for all schedules.

        Groups that were started before come first: complete ones are held, and incomplete ones whose tokens are too old
        for this step are given up. Rounds leave nothing in flight.
        """
        version, admission = self._version, self._admission
        self._count(stats)
        complete = [group for group in self._open.values() if group.is_complete]
        self._start(complete)
        while not all(group.result for group in complete) and (not self._asks_ahead or self._lacks_groups()):
            await self._more_found(stats)
        oldest = admission.oldest_version(version)
        expired = [g for g in self._open.values() if not g.is_complete and g.oldest_version(self._engine.open) < oldest]
        self._give_up(expired)
        self._counted += expired
        stats.given_up += [GroupFate("expired", g.prompt, unscored=g.unscored) for g in expired]
        self._start(self._open.values())
        first_round = admission.first_round(len(self.buffer))
        while self._lacks_groups() or admission.is_round_running(len(self._open)):
            self._ask(admission.while_a_step_waits(self._counts(), first_round, version))
            if admission.is_starved(self._counts()):
                raise StarvedError(self._starvation(stats))
            await self._more_found(stats)

    def _lacks_groups(self) -> bool:
        return len(self.buffer) < self._config.batch.groups_per_step

    async def _more_found(self, stats: RolloutStats) -> None:
        """Wait until groups are found, or places at engines are free, and count the groups."""
        self._changed.clear()
        await self._changed.wait()
        self._count(stats)

    def _count(self, stats: RolloutStats) -> None:
        """Count what was found, and hold the groups that carry a signal and are not too old. Raises what ended a
        group's task."""
        if self._failure:
            raise self._failure
        found, self._found, self._num_kept_of_found = self._found, [], 0
        self._counted += found
        for opened in found:
            group = opened.result
            if isinstance(group, Group):
                self.recent.extend((group.prompt, member) for member in group.trajectories)
                stats.scored.extend(group.trajectories)
                stats.greedy.extend([group.greedy] if group.greedy else [])
                stats.groups.append(group)
                self._observe(group)
                self.buffer.offer(group)
            elif group:
                (stats.unscored if opened.is_complete else stats.given_up).append(group)
        self.buffer.evict_stale(self._version)

    def _counts(self) -> Counts:
        return Counts(
            asked=self._stats.asked_prompts,
            running=self._num_running,
            in_flight=len(self._open),
            held=len(self.buffer) + self._num_kept_of_found + len(self._open) - self._num_running,
            kept_share=self.buffer.recent_kept_share(),
        )

    def _ask(self, num_prompts: int) -> None:
        """Open so many groups, and start them."""
        for index in self.sampler.next(num_prompts):
            prompt = self.prompts[index]
            group = OpenGroup(prompt, tuple(self.new_requests(prompt)))
            self._open[group.id] = group
            self._num_running += 1
            self._latency.start(group.id)
            self._stats.asked_prompts += 1
            group.task = asyncio.create_task(self._roll_out(group))

    def _start(self, groups: Iterable[OpenGroup]) -> None:
        for group in groups:
            group.task = group.task or asyncio.create_task(self._roll_out(group))

    async def _roll_out(self, group: OpenGroup) -> None:
        """One group, from its requests until it is found."""
        try:
            if not group.is_complete:
                try:
                    await group.roll_out(self._environment, self._engine.generate)
                except GenerationFailure:
                    group.result = GroupFate("dropped", group.prompt, unscored=group.unscored)
                self._num_running -= 1
            if not group.result:
                # Engines work on other groups while this one is scored.
                slow = asyncio.get_running_loop().call_later(_SLOW_SCORING_S, self._go_on)
                members = group.members()
                results = await self._queue.score([(group.prompt, trajectory) for trajectory in members])
                slow.cancel()
                scored = [result for result in results if isinstance(result, ScoredTrajectory)]
                if len(scored) < len(members):
                    group.result = GroupFate("dropped", group.prompt, unscored=members)
                else:
                    greedy = scored.pop() if self._has_greedy else None
                    compared = self._scorer.compare(scored, step=self._version + 1)
                    group.result = Group(group.prompt, tuple(compared), greedy)
            group.is_kept = self.buffer.keeps(group.result) if isinstance(group.result, Group) else group.is_complete
            del self._open[group.id]
            self._found.append(group)
            self._num_kept_of_found += group.is_kept
            self._go_on()
        except Exception as error:
            if self._is_training:
                logger.error("the run ends after this step: %s", error)
            self._failure = self._failure or error
            self._changed.set()

    def _go_on(self) -> None:
        """Groups were found, or places at engines are free."""
        self._changed.set()
        self._ask_ahead()

    def _ask_ahead(self) -> None:
        """While a step trains, ask for what the next ones can use in time."""
        if not self._is_training or self._failure:
            return
        self._stats.begin(self._clock())
        has_weights = self._engines_have_weights
        self._ask(self._admission.while_a_step_trains(self._counts(), self._version, engines_have_it=has_weights))

    def weights_arrived(self) -> None:
        """The engines have the weights that the next step starts from."""
        self._engines_have_weights = True
        self._ask_ahead()

    def _give_up(self, groups: Sequence[OpenGroup]) -> None:
        for group in groups:
            del self._open[group.id]
            self._num_running -= not group.is_complete
            if group.task:
                group.task.cancel()

    def give_back(self) -> None:
        """The groups of the last `collect` cannot be trained on: it counts nothing, and a run that continues from
        `state` asks for them again. Not for samplers that need outcomes."""
        self._counts_nothing = self._is_given_back = True
        self._is_training = False

    def _metrics(self, stats: RolloutStats, groups: Sequence[Group]) -> dict[str, float]:
        """Of the step that trains on `groups`."""
        return {
            "rollout/generation_rounds": float(self._admission.num_rounds(stats.asked_prompts)),
            "rollout/groups_in_flight": float(len(self._open)),
            "buffer/size": float(len(self.buffer)),
            **self.sampler.metrics(),
            **metrics_of_sources(stats.groups, self._source_labels),
            **stats.metrics(),
            **scoring_metrics(self._scorer.pop_counts()),
            **group_metrics(groups, self._version, self.buffer.pop_counts()),
            **self._latency.metrics(groups),
            **self._environment.pop_metrics(),
        }

    def pop_fates(self) -> list[GroupFate]:
        """Where the groups of the last `collect` went, also of one that failed: those for its step first, in their
        order. Empty at a second call."""
        fates, self._fates = self._fates, []
        return fates

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON values and arrays for a checkpoint: the state that decides which groups come next."""
        return self.noted_state()()

    def noted_state(self) -> Callable[[], tuple[dict[str, Any], Arrays]]:
        """What makes `state` as it is now, in any thread: to copy all tokens takes long, and requests would wait."""
        sampler, sampler_arrays = self.sampler.state()
        next_request_id, held = self.next_request_id, self.buffer.groups
        found, waiting = self._found, list(self._open.values())
        if self._counts_nothing:
            begun = self._beginning
            held = begun.held
            if self._schedule == "synchronous":
                sampler, next_request_id, found, waiting = begun.sampler, begun.next_request_id, begun.found, []
            else:
                counted = self._counted
                if self._is_given_back:  # Those that were scored, as they were when they were opened.
                    counted = [OpenGroup(g.prompt, g.requests) if isinstance(g.result, Group) else g for g in counted]
                found = [*counted, *found]
                sampler |= {name: begun.sampler[name] for name in ("pending",) if name in sampler}  # Their outcomes.
        numbers = {"cursor": sampler, "next_request_id": next_request_id, "made_with": self._made_with}
        values = {"collector": numbers, "group_seconds": self._latency.state(_ids(held, found, waiting))}
        fed = [group.result for group in found if isinstance(group.result, Group)]
        unscored = [group for group in found if not isinstance(group.result, Group)]
        open_now = [group.copy() for group in (*unscored, *waiting)]
        return partial(_packed, values, sampler_arrays, list(held), fed, open_now)

    def load_state(self, values: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Continue from `state`, but for groups that other settings would not have made. Raises InputError for groups
        in flight if this run's schedule leaves none."""
        self.sampler.load_state(values["collector"]["cursor"], arrays)
        self.next_request_id = int(values["collector"]["next_request_id"])
        self._latency.load_state(values.get("group_seconds", {}))  # Checkpoints of earlier versions lack it.
        made_with = values["collector"].get("made_with", {})  # Checkpoints of earlier versions lack it, or one of it.
        made_with = {"sampling.routing_replay": False, "sampling.stop": [], **made_with}
        changed = [name for name, value in self._made_with.items() if made_with.get(name, value) != value]
        held = unpack_groups(values["buffer"], arrays, self.prompts, "buffer")
        found = unpack_groups(values["fed"], arrays, self.prompts, "fed") if "fed" in values else []
        records = values.get("in_flight") or []
        keeps_trajectories = not any(name.startswith(("sampling.", "environment.")) for name in changed)
        waiting = unpack_open(records, arrays, self.prompts, self._requests, keeps_trajectories=keeps_trajectories)
        num_saved = len(held) + len(found) + len(waiting)
        self.buffer.groups = [g for g in held if not changed and self._fits(g) and self.buffer.keeps(g)]
        self._found = [self._scored_before(g) for g in found if not changed and self._fits(g)]  # The next step filters.
        self._num_kept_of_found = sum(group.is_kept for group in self._found)
        size = self._config.batch.group_size + self._has_greedy
        self._open = {group.id: group for group in waiting if len(group.requests) == size}
        self._num_running = sum(not group.is_complete for group in self._open.values())
        num_kept = len(self.buffer) + len(self._found) + len(self._open)
        if num_kept < num_saved:
            logger.warning(
                "%d of the %d groups that the checkpoint holds or waits for are left out: they were sampled or scored "
                "with other settings than those given now, have another size, are too long or do not pass the filter. "
                "Their prompts have had their turn",
                num_saved - num_kept,
                num_saved,
            )
        if records and self._schedule == "synchronous":
            raise InputError(
                f"the checkpoint has {len(records)} groups in flight, which only rollout.schedule=partial or "
                f"asynchronous can continue, and with algorithm.max_staleness of at least 1; set them, or start a new "
                f"run from the trained weights"
            )

    def _scored_before(self, group: Group) -> OpenGroup:
        requests = self._requests([member.id for member in group.members], group.prompt)
        return OpenGroup(group.prompt, tuple(requests), result=group, is_kept=self.buffer.keeps(group))

    def _fits(self, group: Group) -> bool:
        """Whether a held group is one that this run could have made."""
        is_of_size = len(group.trajectories) == self._config.batch.group_size and not (
            self._has_greedy and group.greedy is None
        )
        return is_of_size and max(lengths_of(group.trajectories)) <= self._config.rollout.max_response_tokens

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
            sampling = self._greedy_sampling if is_greedy else self._sampling
            routes_from = 0 if self._config.rollout.routing_replay and not is_greedy else None
            requests.append(numbered(request_id, prompt, self._config.seed, sampling, routes_from))
        return requests

    def _observe(self, group: Group) -> None:
        """Tell the sampler how the group came out. Raises InputError where that decides and nothing says it."""
        if not self._config.data.sampling.needs_outcomes:
            return
        passed = [self.buffer.filter.passes(scored) for scored in group.trajectories]
        if None in passed:
            raise InputError(
                f"data.sampling.order=prioritised and data.sampling.retire_after need to know which responses are "
                f"correct, and the reward did not say so of every response; {OTHER_FILTERS}"
            )
        self.sampler.observe(GroupTally(group.id, group.prompt.index, sum(map(bool, passed)), len(passed)))

    def _starvation(self, stats: RolloutStats) -> str:
        algorithm, counts = self._config.algorithm, self.buffer.counts
        used = algorithm.dynamic_sampling_on
        outcomes = used.dropped(counts.offered - counts.kept, counts.all_right, counts.all_wrong)
        advice = (
            "Use prompts of another difficulty, raise batch.group_size, batch.generation_groups or "
            f"algorithm.max_generation_rounds, or set {used.instead}algorithm.dynamic_sampling=false"
        )
        if not algorithm.dynamic_sampling:
            advice = (
                "Look for what made groups fail, or raise batch.generation_groups or algorithm.max_generation_rounds"
            )
        num_failed = stats.num_given_up("dropped") + len(stats.unscored)
        return (
            f"dynamic sampling is starved: after {self._admission.num_rounds(stats.asked_prompts)} generation rounds "
            f"of up to {self._config.generation_groups} prompts only {len(self.buffer)} of "
            f"{self._config.batch.groups_per_step} groups are held; acceptance rate {counts.kept_share():.1%} "
            f"({outcomes}, {num_failed} failed of {counts.offered + num_failed}). {advice}"
        )


def _ids(held: Iterable[Group], *others: Iterable[OpenGroup]) -> list[int]:
    """The first request of every group."""
    return [*(group.id for group in held), *(group.id for groups in others for group in groups)]


def _packed(
    values: dict[str, Any], arrays: Arrays, held: Sequence[Group], fed: Sequence[Group], waiting: Sequence[OpenGroup]
) -> tuple[dict[str, Any], Arrays]:
    records, held_arrays = pack_groups(held, "buffer")
    in_flight, in_flight_arrays = pack_open(waiting)
    values = {**values, "buffer": records, "in_flight": in_flight}
    arrays = {**held_arrays, **in_flight_arrays, **arrays}
    if fed:
        values["fed"], fed_arrays = pack_groups(fed, "fed")
        arrays |= fed_arrays
    return values, arrays
