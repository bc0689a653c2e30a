"""The protocol between the trainer and whatever generates: the embedded engine now, an SGLang fleet later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from dapo_mega.types import GenerationFailure, GenerationRequest, Response

NamedTensors = Sequence[tuple[str, torch.Tensor]]
"""Hugging Face parameter names with full (unsharded) tensors."""


class RolloutEngine(Protocol):
    """Generates responses with weights that the trainer pushes.

    Every answer to a request is either a `Response` or a `GenerationFailure`; an engine never invents tokens
    for a request it could not serve.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; -1 before the first `load_weights`."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Response | GenerationFailure]:
        """Answer every request, in the order given."""

    def load_weights(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """Replace all weights by the streamed ones and take over `version` once the stream has ended."""

    def close(self) -> None:
        """Release processes, connections and memory."""
