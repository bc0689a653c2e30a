"""Turns of the policy and of an environment of the user's own, token by token.

A turn's prompt is the prompt, all that was sampled and all that was observed before it: nothing is encoded twice. What
failed or was interrupted goes on where it stopped, in an environment that is brought to the same state; one that cannot
be brought there again begins anew.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from dapo_mega.algorithms.own_code import MisuseError
from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.environments.account import Counts, DiffersError, InTurnsEnvironment
from dapo_mega.environments.base import Begun, Generate, Progress, TrajectoryFailure
from dapo_mega.environments.dialogues import Dialogue
from dapo_mega.environments.observations import Observation
from dapo_mega.environments.pool import EnvironmentPool, LiveEnvironment
from dapo_mega.rewards.processes import CallError
from dapo_mega.rewards.records import RewardRecord
from dapo_mega.types import (
    GenerationRequest,
    LogProbs,
    Prompt,
    Response,
    TokenIds,
    Trajectory,
    Turn,
    extend_spans,
    sampled_rows,
)

_LONGEST_TOKEN: Final = 1024
"""Characters: no vocabulary has longer ones."""


class Turns(InTurnsEnvironment):
    """One environment for each trajectory. No engine's place is held while it works.

    Raises InputError where what it returns is no observation, and when more than `max_failed_share` of a step's
    trajectories, or of `usual_trajectories` if these are more, failed by their environments; the first failure is
    logged in full.
    """

    def __init__(
        self, own: OwnEnvironment, pool: EnvironmentPool, dialogue: Dialogue, usual_trajectories: int = 1
    ) -> None:
        super().__init__(own, usual_trajectories)
        self._own: OwnEnvironment = own
        self._pool = pool
        self._dialogue = dialogue

    def log_to(self, path: Path) -> None:
        self._pool.log_to(path)

    def close(self) -> None:
        self._pool.close()

    def apart(self) -> Turns:
        return Turns(self._own, self._pool, self._dialogue, self._usual_trajectories)

    async def _run(
        self, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        retries = self._own.retries
        while True:
            life = _Life(
                self._pool,
                lambda: self._counts,
                task_of(prompt),
                seed_of_group(request.seed >> 64, prompt.index),
                retries,
            )
            try:
                return await self._played(life, prompt, request, generate, progress)
            except DiffersError as error:
                self.note_differing(error)
                progress.begun, retries = None, life.retries
            except CallError as error:
                begun = progress.begun
                failed = replace(begun.trajectory, stop="failed") if begun else None
                self.note_failure(error)
                raise TrajectoryFailure(request.request_id, str(error), failed) from None
            finally:
                life.close()

    async def _played(
        self, life: _Life, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        own, started = self._own, time.monotonic()
        begun = progress.begun
        rows = Rows(request, begun.trajectory if begun else None)
        life.action_of = partial(self._action, rows)
        if begun:
            life.observations, life.snapshot = list(begun.observations), begun.snapshot
        else:
            first = await life.observe("reset", life.task, life.seed)
            if self._is_huge(first) or not self._add(rows, self._dialogue.opening(prompt.messages, first.messages)):
                raise CallError("its first observation is too long")
        while True:
            turn = len(rows.turns)
            if len(life.observations) > turn:
                rows.add(await generate(rows.next_request(turn, own.max_turn_tokens)))
                progress.begun = Begun(rows.trajectory(), tuple(life.observations), life.snapshot)
                turn += 1
            observation = await life.observe("step", life.action_of(turn - 1))
            rows.note(observation.earned)
            stop = observation.stop or ("turns" if turn == own.max_turns else "")
            if not stop and own.trajectory_limit_s and time.monotonic() - started > own.trajectory_limit_s:
                stop = "timeout"
            if not stop and not rows.left:
                stop = "tokens"
            if not stop and (self._is_huge(observation) or not self._add(rows, self._following(rows, observation))):
                stop = "context"
            if stop:
                return rows.trajectory(stop)
            progress.begun = Begun(rows.trajectory(), tuple(life.observations), life.snapshot)

    def _following(self, rows: Rows, observation: Observation) -> list[int]:
        token_ids = self._dialogue.extend(*rows.of_turn(len(rows.turns) - 1), observation.messages)
        if token_ids is None:
            raise MisuseError(
                "the chat template cannot be continued behind this turn of the policy without a change of what is "
                "before it; use a template that only appends"
            )
        return token_ids

    def _action(self, rows: Rows, turn: int) -> dict[str, Any]:
        """What the environment is told of this turn."""
        prompt_ids, sampled_ids = rows.of_turn(turn)
        read = self._dialogue.read(prompt_ids, sampled_ids)
        finish_reason = rows.turns[turn].finish_reason
        return {**read._asdict(), "finish_reason": finish_reason, "turn": turn, "token_ids": sampled_ids}

    def _is_huge(self, observation: Observation) -> bool:
        """Whether it is too long for sure. To encode megabytes takes minutes, and all memory."""
        num_characters = sum(len(text) for message in observation.messages for text in message.values())
        return num_characters > self._own.max_observation_tokens * _LONGEST_TOKEN

    def _add(self, rows: Rows, token_ids: Sequence[int]) -> bool:
        """Add what was observed, unless it is too long or leaves no place for a turn."""
        if len(token_ids) > self._own.max_observation_tokens or len(token_ids) >= rows.left:
            return False
        rows.append(np.array(token_ids, np.int32))
        return True


class _Life:
    """The environment of one trajectory, made again where it failed. `observations` are what it returned, `action_of`
    is what it was told of a turn, and `counts` gives those of the present step, of which it may see several."""

    action_of: Callable[[int], dict[str, Any]]

    def __init__(
        self, pool: EnvironmentPool, counts: Callable[[], Counts], task: Mapping[str, Any], seed: int, retries: int
    ) -> None:
        self._pool = pool
        self._counts = counts
        self.task = task
        self.seed = seed
        self.retries = retries
        self._live: LiveEnvironment | None = None
        self.observations: list[Any] = []
        self.snapshot = ""

    async def observe(self, *call: Any) -> Observation:
        """What a method returns, its name first. Raises CallError where it failed once too often, and DiffersError."""
        while True:
            begin = time.monotonic()
            try:
                live = await self._brought_here()
                returned, observation, snapshot = await live.observe(*call)
                break
            except CallError:
                self.close()
                if not self.retries:
                    raise
                self.retries -= 1
                self._counts().events["retries"] += 1
            finally:
                self._counts().events["calls"] += 1
                self._counts().call_s += time.monotonic() - begin
        self.observations.append(returned)
        self.snapshot = snapshot
        return observation

    async def _brought_here(self) -> LiveEnvironment:
        if self._live:
            return self._live
        live = self._live = await self._pool.open()
        self._counts().events["replays"] += bool(self.observations)
        if self.snapshot:
            await live.restore(self.snapshot)
            return live
        for turn, seen in enumerate(self.observations):
            call = ("step", self.action_of(turn - 1)) if turn else ("reset", self.task, self.seed)
            returned, _, _ = await live.observe(*call)
            if returned != seen:
                raise DiffersError(
                    f"its method {call[0]} returned {returned!r:.100}, and before {seen!r:.100}, for the same task, "
                    f"seed and turns; draw from a generator made of the seed, or give it snapshot and restore"
                )
        return live

    def close(self) -> None:
        """Close the environment, without waiting for it."""
        live, self._live = self._live, None
        if live:
            live.close()


class Rows:
    """The rows of a trajectory so far. In `token_ids` the ids of its prompt are before those of the rows."""

    def __init__(self, request: GenerationRequest, begun: Trajectory | None = None) -> None:
        self._request = request
        self._prompt_length = len(request.prompt_token_ids)
        self.token_ids = request.prompt_token_ids
        self._logprobs, self._sampled = np.empty(0, np.float32), np.empty(0, np.bool_)
        self.turns: list[Turn] = []
        self._versions: list[tuple[int, int]] = []
        self._engines: list[tuple[str, int]] = []
        if begun:
            self.token_ids = np.concatenate([self.token_ids, begun.token_ids])
            self._logprobs, self._sampled, self.turns = begun.logprobs, begun.sampled, list(begun.turns)
            self._versions, self._engines = list(begun.version_spans), list(begun.engine_spans)

    @property
    def left(self) -> int:
        """Tokens for which there is place."""
        return self._request.sampling.max_new_tokens - len(self._sampled)

    def next_request(self, turn: int, max_turn_tokens: int | None) -> GenerationRequest:
        """The request of this turn, with random numbers of its own."""
        return replace(
            self._request,
            prompt_token_ids=self.token_ids,
            seed=_seed_of_turn(self._request.seed, turn),
            engine=self._engines[-1][0] if self._engines else "",
            sampling=replace(self._request.sampling, max_new_tokens=min(self.left, max_turn_tokens or self.left)),
        )

    def of_turn(self, turn: int) -> tuple[list[int], list[int]]:
        """The prompt of a turn, and what was sampled for it."""
        stop = self.turns[turn].stop
        begin = self.turns[turn - 1].stop if turn else 0
        split, end = self._prompt_length + sampled_rows(self._sampled, begin, stop).start, self._prompt_length + stop
        return self.token_ids[:split].tolist(), self.token_ids[split:end].tolist()

    def add(self, response: Response) -> None:
        """Add a turn of the policy. Rows that were observed before it have its first version and engine."""
        start, length = len(self._sampled), len(response.token_ids)
        self.append(response.token_ids, response.logprobs)
        versions = response.version_spans or ((response.weight_version, length),)
        extend_spans(self._versions, versions, start)
        extend_spans(self._engines, response.engine_spans, start)
        self.turns.append(Turn(start + length, response.finish_reason))

    def note(self, parts: Mapping[str, float]) -> None:
        """Say what the last turn earned."""
        self.turns[-1] = replace(self.turns[-1], parts=parts)

    def append(self, token_ids: TokenIds, logprobs: LogProbs | None = None) -> None:
        """Add rows, which were observed where they have no log-probs."""
        length = len(token_ids)
        self.token_ids = np.concatenate([self.token_ids, token_ids])
        of_rows = np.zeros(length, np.float32) if logprobs is None else logprobs
        self._logprobs = np.concatenate([self._logprobs, of_rows])
        self._sampled = np.concatenate([self._sampled, np.full(length, logprobs is not None)])

    def trajectory(self, stop: str = "") -> Trajectory:
        return Trajectory(
            self._request.request_id,
            self.token_ids[self._prompt_length :],
            self._logprobs,
            self._sampled,
            tuple(self.turns),
            tuple(self._versions),
            tuple(self._engines),
            (len(self._sampled),),
            stop,
        )


def _seed_of_turn(seed: int, turn: int) -> int:
    """Below 2^128, as those of all requests; the first turn has the request's own."""
    return int.from_bytes(hashlib.sha256(f"{seed} {turn}".encode()).digest()[:16], "big") if turn else seed


def seed_of_group(seed: int, index: int) -> int:
    """The seed of the environments of the prompt with this index, in a run with this seed: below 2^63."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)


def task_of(prompt: Prompt | RewardRecord) -> dict[str, Any]:
    """What an environment is told of its row: the same for all trajectories of a group."""
    return {
        "prompt": prompt.prompt if isinstance(prompt, RewardRecord) else prompt.problem or prompt.text,
        "messages": [dict(message) for message in prompt.messages],
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "fields": dict(prompt.fields),
    }
