"""Turns of the policy and of an environment of the user's own, token by token.

A turn's prompt is the prompt, all that was sampled and all that was observed before it: nothing is encoded twice. Where
the template or the environment rewrites that, the turn begins a piece of the trajectory with all of its prompt. What
failed or was interrupted goes on where it stopped, in an environment that is brought to the same state; one that cannot
be brought there again begins anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.environments.account import Counts, DiffersError, InTurnsEnvironment
from dapo_mega.environments.base import Begun, Generate, Progress
from dapo_mega.environments.dialogues import Dialogue
from dapo_mega.environments.observations import Observation, read_observation
from dapo_mega.environments.pool import EnvironmentPool, LiveEnvironment
from dapo_mega.environments.rows import LONGEST_TOKEN, Pieces
from dapo_mega.errors import InputError
from dapo_mega.rewards.processes import CallError
from dapo_mega.rewards.records import RewardRecord
from dapo_mega.types import GenerationRequest, Prompt, Trajectory

logger = logging.getLogger(__name__)


class Turns(InTurnsEnvironment):
    """One environment for each trajectory. No engine's place is held while it works.

    Raises InputError when more than `max_failed_share` of a step's trajectories, or of `usual_trajectories` if these
    are more, failed by their environments; the first failure is logged in full.
    """

    def __init__(
        self, own: OwnEnvironment, pool: EnvironmentPool, dialogue: Dialogue, usual_trajectories: int = 1
    ) -> None:
        super().__init__(own, usual_trajectories)
        self._own: OwnEnvironment = own
        self._pool = pool
        self._dialogue = dialogue
        self._is_warned = False

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
            finally:
                life.close()

    async def _played(
        self, life: _Life, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        own, started, begun = self._own, time.monotonic(), progress.begun
        pieces = Pieces(request, begun.trajectory if begun else None)
        life.action_of = partial(self._action, pieces)
        if begun:
            life.observations, life.snapshot = list(begun.observations), begun.snapshot
        while True:
            turn = pieces.num_turns
            if turn < len(life.observations):
                observation = read_observation(life.observations[turn], "it")
            else:
                call = ("step", life.action_of(turn - 1)) if turn else ("reset", life.task, life.seed)
                observation = await life.observe(*call)
            stop = ""
            if turn:
                pieces.last.note(observation.earned)
                stop = observation.stop or ("turns" if turn == own.max_turns else "")
                if not stop and own.trajectory_limit_s and time.monotonic() - started > own.trajectory_limit_s:
                    stop = "timeout"
                if not stop and not pieces.left:
                    stop = "tokens"
            stop = stop or self._add(pieces, prompt, life.observations, observation)
            trajectory = pieces.trajectory(stop)
            if stop:
                if trajectory is None:
                    raise CallError("its first observation is too long")
                return trajectory
            if trajectory:
                progress.begun = Begun(trajectory, tuple(life.observations), life.snapshot)
            limit = min(pieces.left, own.max_turn_tokens or pieces.left)
            pieces.last.add(await generate(pieces.last.next_request(turn, limit)))
            if trajectory := pieces.trajectory():
                progress.begun = Begun(trajectory, tuple(life.observations), life.snapshot)

    def _add(self, pieces: Pieces, prompt: Prompt, observations: Sequence[Any], observation: Observation) -> str:
        """Add the last observation. It begins a new piece where what is before it is to be written otherwise. Says why
        the trajectory is over where it is too long or leaves no place for a turn (context), or where the template does
        not write the turns before it again (parse)."""
        num_characters = sum(len(text) for message in observation.messages for text in message.values())
        limit = self._own.max_observation_tokens
        if num_characters > limit * LONGEST_TOKEN:
            return "context"
        before, sampled = pieces.of_turn(pieces.num_turns - 1) if pieces.num_turns else ([], [])
        ids = None
        if not observation.rewrite and not before:
            ids = self._dialogue.opening(prompt.messages, observation.messages)
        elif not observation.rewrite:
            history = [] if self._own.history == "sampled" else self._history(pieces, prompt, observations[:-1])
            ids = self._dialogue.extend(before, sampled, observation.messages, history)
        is_new = ids is None
        if ids is None:
            before += sampled
            try:
                ids = self._dialogue.whole(self._history(pieces, prompt, observations))
            except InputError as error:
                if not before:
                    raise
                if not self._is_warned:
                    logger.warning("environment: %s: trajectories end with stop=parse: %s", self._own.title, error)
                self._is_warned = True
                return "parse"
            if not ids:
                raise CallError("it returned rewrite=True without any text; give text or messages")
            if before and ids[: len(before)] == before:
                ids, is_new = ids[len(before) :], False
        if len(ids) > limit + len(before) * is_new or len(ids) >= pieces.left:
            return "context"
        if is_new or not pieces.num_turns:
            pieces.begin(ids, is_behind_row=not is_new)
        else:
            pieces.last.append(ids)
        return ""

    def _history(self, pieces: Pieces, prompt: Prompt, observations: Sequence[Any]) -> list[Mapping[str, Any]]:
        """The conversation up to the last of these observations, or up to the turn behind it."""
        messages: list[Mapping[str, Any]] = [*prompt.messages]
        for turn, returned in enumerate(observations):
            seen = read_observation(returned, "it")
            messages = [*(() if seen.rewrite else messages), *seen.messages]
            if turn < pieces.num_turns:
                messages.append(self._dialogue.said(*pieces.of_turn(turn)))
        return messages

    def _action(self, pieces: Pieces, turn: int) -> dict[str, Any]:
        """What the environment is told of this turn."""
        prompt_ids, sampled_ids = pieces.of_turn(turn)
        read = self._dialogue.read(prompt_ids, sampled_ids)
        finish_reason = pieces.turns[turn].finish_reason
        return {**read._asdict(), "finish_reason": finish_reason, "turn": turn, "token_ids": sampled_ids}


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
                self._counts()["retries"] += 1
            finally:
                self._counts()["calls"] += 1
                self._counts()["call_s"] += time.monotonic() - begin
        self.observations.append(returned)
        self.snapshot = snapshot
        return observation

    async def _brought_here(self) -> LiveEnvironment:
        if self._live:
            return self._live
        live = self._live = await self._pool.open()
        self._counts()["replays"] += bool(self.observations)
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
