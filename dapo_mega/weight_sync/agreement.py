"""Compares log-probs of one fixed sequence between the trainer and each joining engine, to check that both compute the
same model.

An update checks names and shapes only, so it can succeed on an engine with one more layer or another rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist

from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import RunConfig
from dapo_mega.engines.sglang.api import MalformedAnswer, parse_scores, scoring_payload
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineGarbled
from dapo_mega.engines.sglang.versions import VersionRange
from dapo_mega.types import LogProbs, Prompt, TokenIds

if TYPE_CHECKING:
    from dapo_mega.megatron.megatron_policy import MegatronPolicy

_LENGTH = 64


class Agreement(Protocol):
    """The sequence and the log-probs on which engines must agree with the trainer."""

    tokens: TokenIds
    tolerance: float
    """The largest allowed mean difference, in nats."""

    def expected(self, version: int) -> LogProbs:
        """The trainer's log-probs [L - 1] of all tokens but the first with the weights of `version`. Collective."""


class PolicyAgreement:
    """Implements `Agreement` with the policy, which scores the sequence once per version at which engines join."""

    def __init__(self, policy: MegatronPolicy, config: RunConfig, prompts: Sequence[Prompt]) -> None:
        """`prompts` is the run's dataset; the same on every process."""
        self.tokens = fixed_sequence(config, prompts, policy.arch.vocab_size)
        self.tolerance = config.engine_tolerance
        self._policy = policy
        self._config = config
        self._version = -1
        self._logprobs = np.empty(0, np.float32)

    def expected(self, version: int) -> LogProbs:
        if version != self._version:
            self._version, self._logprobs = version, self._score()
        return self._logprobs

    def _score(self) -> LogProbs:
        policy = self._policy
        batch = policy.pack(
            flatten([single_turn(self.tokens[:1], self.tokens[1:], in_loss=False)]),
            token_budget=self._config.batch.tokens_per_microbatch,
            aggregation=self._config.algorithm.aggregation,
            max_response_tokens=self._config.rollout.max_response_tokens,
        )
        # Engines score prompts without the sampling temperature.
        scores = policy.score(batch.mini_batches[0], temperature=1.0)
        logprobs = torch.zeros(len(self.tokens) - 1, dtype=torch.float32)
        if policy.processes.counts_outputs:
            for micro_batch, score in zip(batch.mini_batches[0], scores, strict=True):
                logprobs[micro_batch.of_responses(micro_batch.positions).cpu()] = score.logprobs.float().cpu()
        dist.all_reduce(logprobs, group=policy.processes.control)
        return logprobs.numpy()


def fixed_sequence(config: RunConfig, prompts: Sequence[Prompt], vocab_size: int) -> TokenIds:
    """64 tokens, or half of the run's longest sequence: from the first prompts, then random ones if the prompts are too
    short. The vocabulary's last token is left out, because SGLang scores another token in its place."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    length = max(2, min(_LENGTH, longest // 2))
    tokens: list[int] = []
    for prompt in prompts[:length]:
        tokens += [token for token in prompt.token_ids.tolist() if 0 <= token < vocab_size - 1]
        if len(tokens) >= length:
            break
    missing = max(length - len(tokens), 0)
    tokens += np.random.default_rng(config.seed).integers(0, max(vocab_size - 1, 1), missing).tolist()
    return np.array(tokens[:length], dtype=np.int32)


async def engine_logprobs(
    client: EngineClient, token_ids: TokenIds, versions: VersionRange, timeout_s: float
) -> LogProbs:
    """The engine's log-probs [L - 1] of all tokens but the first, in nats. Raises EngineError, also where other weights
    gave them."""
    body = await client.generate(scoring_payload(token_ids), timeout_s)
    try:
        return parse_scores(body, token_ids, versions)
    except MalformedAnswer as error:
        raise EngineGarbled(client.url, f"unusable answer: {error}") from error


def mean_difference(engine: LogProbs, expected: LogProbs) -> float:
    """The mean absolute difference in nats; NaN if an engine's log-prob is NaN."""
    return float(np.abs(engine.astype(np.float64) - expected.astype(np.float64)).mean())
