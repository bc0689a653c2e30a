"""Compares log-probs of one fixed sequence between the trainer and each joining engine, to check that both compute the
same model.

An update checks names and shapes only, so it can succeed on an engine with one more layer or another rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dapo_mega.config import RunConfig
from dapo_mega.engines.sglang.api import MalformedAnswer, parse_scores, scoring_payload
from dapo_mega.engines.sglang.engine_client import EngineClient, EngineGarbled
from dapo_mega.engines.sglang.versions import VersionRange
from dapo_mega.types import LogProbs, Prompt, TokenIds

_LENGTH = 64


@dataclass(frozen=True)
class Agreement:
    """The sequence [L] on which engines must agree with the trainer, and the largest allowed mean difference of its
    log-probs, in nats."""

    tokens: TokenIds
    tolerance: float


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
    client: EngineClient, token_ids: TokenIds, versions: VersionRange, timeout_s: float, adapter: str = ""
) -> LogProbs:
    """The engine's log-probs [L - 1] of all tokens but the first, in nats. Raises EngineError, also where other weights
    gave them."""
    body = await client.generate(scoring_payload(token_ids, adapter), timeout_s)
    try:
        return parse_scores(body, token_ids, versions)
    except MalformedAnswer as error:
        raise EngineGarbled(client.url, f"unusable answer: {error}") from error


def mean_difference(engine: LogProbs, expected: LogProbs) -> float:
    """The mean absolute difference in nats; NaN if an engine's log-prob is NaN."""
    return float(np.abs(engine.astype(np.float64) - expected.astype(np.float64)).mean())
