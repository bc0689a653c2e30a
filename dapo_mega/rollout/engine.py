"""The protocols between the trainer and whatever generates: embedded engines or a fleet of SGLang servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dapo_mega.types import Answer, GenerationRequest

NamedTensors = Sequence[tuple[str, torch.Tensor]]
"""Hugging Face parameter names with full (unsharded) tensors."""


class RolloutEngine(Protocol):
    """Answers requests with the weights it holds.

    Every answer to a request is either a `Response` or a `GenerationFailure`; an engine never invents tokens
    for a request it could not serve.
    """

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Answer every request, in the order given."""


class StreamingEngine(RolloutEngine, Protocol):
    """Answers requests one by one as they finish; many may be in flight, also between steps."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take the requests on and return at once."""

    def next_answer(self) -> Answer:
        """Wait for the next finished request. Raises FleetError when the engines do not come back in time."""

    def poll_answer(self) -> Answer | None:
        """A finished request that `next_answer` would give without waiting; None when there is none."""

    def oldest_versions(self, request_ids: Sequence[int]) -> dict[int, int]:
        """The oldest weights that have a part in each request, by id: those that sampled its first token, or, while it
        has none, those that it would begin with now. Requests that have ended are left out."""

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Give up requests in flight; they are not answered any more."""


class RolloutFleet(RolloutEngine, Protocol):
    """All engines of a run, constructed on every process and driven by rank 0.

    While rank 0 generates the other processes are in `serve`, until rank 0 calls `release`.
    """

    def on_stale_engines(self, update: Callable[[], object]) -> None:
        """Say what brings the current weights to engines that join or come back meanwhile: a collective."""

    def serve(self) -> None:
        """Work for rank 0 until it releases; on the other processes only."""

    def release(self) -> None:
        """Send the other processes on; rank 0 only."""

    def sleep(self) -> None:
        """Free the memory that the policy needs to train, where engines and policy share it; rank 0 only."""

    def pop_metrics(self) -> dict[str, float]:
        """The fleet's counters since the last call; rank 0 only."""

    def close(self) -> None:
        """Let go of processes, connections and memory."""


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
