"""The data that flows from prompt to policy update: frozen records without behaviour.

One prompt travels left to right through the system::

    Prompt -> GenerationRequest -> Response -> ScoredResponse -> Group -> Sample -> (packed) MicroBatch

Arrays are NumPy up to `Group` and torch tensors from `Sample` (see `batching/samples.py`) on. Lengths are in tokens,
log-probabilities in nats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

TokenIds = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]
NamedTensors = Sequence[tuple[str, "torch.Tensor"]]
"""Hugging Face parameter names with full (unsharded) tensors."""

FinishReason = Literal["stop", "length"]
"""`stop`: a stop token was sampled; `length`: the response limit cut the response off (truncated)."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One question of a dataset, rendered and tokenised.

    `index` is the row in the dataset after deduplication: the prompt's identity within a run.
    `token_ids` [P] int32 already contain the chat or bare template.
    """

    index: int
    text: str
    token_ids: TokenIds
    ground_truth: str
    data_source: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `temperature` > 0, or 0 for greedy; `top_k` 0 means no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Ask an engine for one response.

    `request_id` is unique within a run. `seed` alone decides the random numbers of this request, so the
    response depends neither on what else is in the batch nor on which engine serves it.
    """

    request_id: int
    prompt_token_ids: TokenIds
    seed: int
    sampling: SamplingParams


@dataclass(frozen=True, eq=False)
class Response:
    """What an engine sampled for one request.

    `token_ids` [L] int32 include the stop token when there is one. `logprobs` [L] float32 are the sampled
    tokens' log-probabilities under softmax(logits / temperature), not renormalised for top_p / top_k.
    `weight_version` is the oldest version of the policy's weights that sampled any of it. `version_spans` says which
    version sampled which tokens where there were several: (version, end) with ascending ends, the last of them L.
    `engine_spans` says the same of the engines of a fleet: (URL, end), also of a single one.
    """

    request_id: int
    token_ids: TokenIds
    logprobs: LogProbs
    finish_reason: FinishReason
    weight_version: int
    version_spans: tuple[tuple[int, int], ...] = ()
    engine_spans: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class GenerationFailure:
    """A request that no engine answered; never turned into a reward."""

    request_id: int
    reason: str


Answer = Response | GenerationFailure


@dataclass(frozen=True, eq=False)
class ScoredResponse:
    """A response with its verdict.

    `correct` decides dynamic sampling; `accuracy_reward` is the rule reward before shaping and `reward` the
    one trained on (after the overlong punishment).
    """

    response: Response
    text: str
    correct: bool
    accuracy_reward: float
    reward: float


@dataclass(frozen=True, eq=False)
class Group:
    """All responses to one prompt. `weight_version` is the oldest version among its responses."""

    prompt: Prompt
    responses: tuple[ScoredResponse, ...]
    weight_version: int


class WeightSource(Protocol):
    """The policy: its weights as Hugging Face tensors in buckets. Collectives over all processes."""

    def weights(self, bucket_bytes: int) -> Iterator[NamedTensors]:
        """Full tensors on the leader of every replica, nothing on the other processes."""

    def stage_weights(self, bucket_bytes: int, most_bytes: int | None = None) -> Iterator[StageBucket]:
        """Full tensors on the leader of the pipeline stage that holds them, in the first replica only; what a bucket
        consists of is known everywhere. At most two buckets of at most `bucket_bytes` exist at a time, each of at least
        one tensor. With `most_bytes` large tensors are pieces themselves; those that the leader holds whole are not
        copied, and count for a bucket's size of at most `most_bytes` only."""


@dataclass(frozen=True)
class StageBucket:
    """Tensors that travel together, in the order of `names`, as runs of bytes with `piece_lengths` tensors each.

    `stage` is the pipeline stage whose leader holds the pieces, each [bytes] uint8; None on all other processes. They
    are to be read once, before the next bucket is asked for.
    `dtypes` are torch's names (`bfloat16`), `shapes` those of the full tensors.
    """

    stage: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    piece_lengths: tuple[int, ...]
    pieces: Iterable[torch.Tensor] | None
    is_last: bool
