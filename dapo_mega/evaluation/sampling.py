"""Asks a model that is not trained: the interface, and the embedded engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from dapo_mega.distributed import accelerator
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import InputError
from dapo_mega.evaluation.model_folder import model_weights
from dapo_mega.types import Answer, GenerationRequest

Parts = Iterable[tuple[int, Sequence[GenerationRequest]]]
"""Requests that belong together, with the number of their part."""


class Sampler(Protocol):
    """Answers requests with the model."""

    engines: tuple[str, ...]
    """What samples, with its version."""

    @abstractmethod
    def sample(self, parts: Parts) -> Iterator[tuple[int, Sequence[Answer]]]:
        """Each part's number with its answers, as soon as all of them are there."""

    def close(self) -> None:
        """Free memory, processes and connections."""


class EmbeddedSampler(Sampler):
    """Generates in this process, a part at a time. The tokens depend on the requests of the part, not on which parts
    went before."""

    engines = ("embedded",)

    def __init__(self, model: Path, dtype: str, max_batch_rows: int) -> None:
        """Raises InputError for a model that the engine cannot load."""
        self._engine = load_engine(model, dtype, max_batch_rows)

    def sample(self, parts: Parts) -> Iterator[tuple[int, Sequence[Answer]]]:
        """See `Sampler`."""
        for number, requests in parts:
            yield number, self._engine.generate(requests)

    def close(self) -> None:
        """See `Sampler`."""
        self._engine.close()


def load_engine(model: Path, dtype: str, max_batch_rows: int) -> EmbeddedEngine:
    """The embedded engine with the model of a Hugging Face folder. Raises InputError for one that cannot be loaded."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    try:
        engine = EmbeddedEngine.from_config(model, kind, max_batch_rows, accelerator.device())
        engine.load_weights(model_weights(model, kind), 0)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{model} cannot be loaded ({reason}); copy the checkpoint again") from error
    return engine
