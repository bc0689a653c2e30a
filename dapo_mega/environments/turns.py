"""Turns of the policy and of an environment of the user's own, token by token.

A turn's prompt is the prompt, all that was sampled and all that was observed before it: nothing is encoded twice.
Observations are encoded by themselves, without special tokens, so that hostile text stays text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dapo_mega.config import RunConfig
from dapo_mega.config.environment import EARNED, OwnEnvironment
from dapo_mega.data.tokenizer import Decode, decoder
from dapo_mega.distributed.event_loops import beside
from dapo_mega.environments.base import SINGLE_TURN, Environment, Generate
from dapo_mega.types import GenerationFailure, GenerationRequest, LogProbs, Prompt, Response, TokenIds, Trajectory, Turn

T = TypeVar("T")


class Turns(Environment):
    """One environment for each trajectory. Its methods are called one after the other, beside the event loop, and no
    engine's place is held meanwhile. What it raises ends the run, as InputError."""

    def __init__(self, own: OwnEnvironment, encode: Callable[[str], Sequence[int]], decode: Decode) -> None:
        self._own = own
        self._encode = encode
        self._decode = decode

    async def run(self, prompt: Prompt, request: GenerationRequest, generate: Generate) -> Trajectory:
        """Ends when the environment says so, after `max_turns`, or where the next turn or observation has no place in
        the `max_new_tokens` of the request, which are for all rows. Raises GenerationFailure too where the first
        observation has no place."""
        environment = await beside(self._own.make)
        try:
            rows = _Rows(request)
            observation = await self._observe(environment, "reset", _task(prompt), _seed_of(prompt, request))
            if not self._add(rows, observation["text"]):
                raise GenerationFailure(request.request_id, "its environment's first observation is too long")
            for turn in range(self._own.max_turns):
                response = await generate(rows.next_request(turn, self._own.max_turn_tokens))
                rows.add(response)
                (text,) = self._decode([response.token_ids])
                action = {
                    "text": text,
                    "finish_reason": response.finish_reason,
                    "turn": turn,
                    "token_ids": response.token_ids.tolist(),
                }
                observation = await self._observe(environment, "step", action)
                rows.end_turn(response, observation)
                if observation["done"] or turn + 1 == self._own.max_turns or not self._add(rows, observation["text"]):
                    break
            return rows.trajectory()
        finally:
            await beside(partial(self._own.closed, environment))

    async def _observe(self, environment: Any, method: str, *arguments: Any) -> dict[str, Any]:
        return await beside(partial(self._own.observed, environment, method, *arguments))

    def _add(self, rows: _Rows, text: str) -> bool:
        """Add the observation, unless it is too long or leaves no place for a turn."""
        token_ids = self._encode(text) if text else []
        if len(token_ids) > self._own.max_observation_tokens or len(token_ids) >= rows.left:
            return False
        rows.observe(token_ids)
        return True


class _Rows:
    """The rows of a trajectory so far. The ids of its prompt are before those of the rows."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._num_rows = 0
        self._token_ids: list[TokenIds] = [request.prompt_token_ids]
        self._logprobs: list[LogProbs] = [np.empty(0, np.float32)]
        self._sampled: list[npt.NDArray[np.bool_]] = [np.empty(0, np.bool_)]
        self._turns: list[Turn] = []
        self._versions: list[tuple[int, int]] = []
        self._engines: list[tuple[str, int]] = []

    @property
    def left(self) -> int:
        """Tokens for which there is place."""
        return self._request.sampling.max_new_tokens - self._num_rows

    def next_request(self, turn: int, max_turn_tokens: int | None) -> GenerationRequest:
        """The request of this turn, with random numbers of its own."""
        self._token_ids = [np.concatenate(self._token_ids)]
        return replace(
            self._request,
            prompt_token_ids=self._token_ids[0],
            seed=_seed_of_turn(self._request.seed, turn),
            sampling=replace(self._request.sampling, max_new_tokens=min(self.left, max_turn_tokens or self.left)),
        )

    def observe(self, token_ids: Sequence[int]) -> None:
        length = len(token_ids)
        self._append(np.array(token_ids, np.int32), np.zeros(length, np.float32), np.zeros(length, np.bool_))

    def add(self, response: Response) -> None:
        """Add a turn of the policy. Rows that were observed before it have its first version and engine."""
        start, length = self._num_rows, len(response.token_ids)
        self._append(response.token_ids, response.logprobs, np.ones(length, np.bool_))
        versions = response.version_spans or ((response.weight_version, length),)
        _extend(self._versions, [(version, start + end) for version, end in versions])
        _extend(self._engines, [(engine, start + end) for engine, end in response.engine_spans])

    def _append(self, token_ids: TokenIds, logprobs: LogProbs, sampled: npt.NDArray[np.bool_]) -> None:
        self._num_rows += len(token_ids)
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        self._sampled.append(sampled)

    def end_turn(self, response: Response, observation: dict[str, Any]) -> None:
        """Note what the environment says of the turn."""
        earned = {name: float(value) for name, value in observation["parts"].items()}
        earned |= {name: float(observation[name]) for name in EARNED if observation[name] is not None}
        self._turns.append(Turn(self._num_rows, response.finish_reason, earned))

    def trajectory(self) -> Trajectory:
        return Trajectory(
            self._request.request_id,
            np.concatenate(self._token_ids)[len(self._request.prompt_token_ids) :],
            np.concatenate(self._logprobs),
            np.concatenate(self._sampled),
            tuple(self._turns),
            tuple(self._versions),
            tuple(self._engines),
            (self._num_rows,),
        )


def _extend(spans: list[tuple[T, int]], more: Sequence[tuple[T, int]]) -> None:
    """Add spans (what, end); those of one thing that follow one another become one."""
    for what, end in more:
        if spans and spans[-1][0] == what:
            spans.pop()
        spans.append((what, end))


def make_environment(config: RunConfig, tokenizer: Any) -> Environment:
    """The run's environment."""
    own = config.environment
    if not isinstance(own, OwnEnvironment):
        return SINGLE_TURN

    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return token_ids

    return Turns(own, encode, decoder(tokenizer))


def _seed_of_turn(seed: int, turn: int) -> int:
    """Below 2^128, as those of all requests; the first turn has the request's own."""
    return int.from_bytes(hashlib.sha256(f"{seed} {turn}".encode()).digest()[:16], "big") if turn else seed


def _seed_of(prompt: Prompt, request: GenerationRequest) -> int:
    """The same for all trajectories of a prompt in a run, below 2^63."""
    return int(np.random.SeedSequence([request.seed >> 64, prompt.index]).generate_state(1, np.uint64)[0] >> 1)


def _task(prompt: Prompt) -> dict[str, Any]:
    """What an environment is told of its row: the same for all trajectories of a group."""
    return {
        "prompt": prompt.problem or prompt.text,
        "messages": [dict(message) for message in prompt.messages],
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "fields": dict(prompt.fields),
    }
