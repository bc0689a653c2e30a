"""A model that is asked and not trained, for evaluations and for the difficulty of prompts: in this process, or behind
SGLang engines that hold it already."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dapo_mega.config import RunConfig
from dapo_mega.config.fleet import require_api_key
from dapo_mega.errors import InputError
from dapo_mega.models import load_architecture
from dapo_mega.types import Answer, GenerationRequest

_PIECE_BYTES = 2**20


class AskedModel(Protocol):
    """Answers requests."""

    def answers(self, batches: Iterable[list[GenerationRequest]]) -> Iterator[Answer]:
        """One answer per request, as they come. The embedded engine decodes each batch by itself: equal batches give
        equal answers, bit for bit. A fleet takes requests as it has room, whatever their batch."""


@contextmanager
def asked_model(config: RunConfig, check_stop: Callable[[], None] = lambda: None) -> Iterator[AskedModel]:
    """The model of `model.path`: inside this process for `rollout.placement=embedded`, else as the engines of
    `rollout.fleet.urls` hold it.

    Raises InputError for a folder without a model, no URLs, or no API key. `check_stop` may raise StopRequested.
    """
    _, arch = load_architecture(Path(config.model.path))
    if config.rollout.placement == "embedded":
        yield _EmbeddedModel(config, check_stop)
        return
    from dapo_mega.engines.sglang.held_fleet import HeldFleet

    fleet = config.rollout.fleet
    if not fleet.urls:
        raise InputError("rollout.fleet.urls names no engine; give the URLs of engines that run")
    engines = HeldFleet(config, arch.vocab_size, require_api_key(fleet.api_key_env), arch, check_stop)
    try:
        yield engines
    finally:
        engines.close()


class _EmbeddedModel:
    """The checkpoint of `model.path` in the embedded engine."""

    def __init__(self, config: RunConfig, check_stop: Callable[[], None]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from dapo_mega.distributed import accelerator
        from dapo_mega.engines.embedded.engine import EmbeddedEngine

        if config.threads_per_process:
            torch.set_num_threads(config.threads_per_process)
        dtype = torch.bfloat16 if config.engine_dtype == "bf16" else torch.float32
        rows, device = config.rollout.max_batch_rows, accelerator.device()
        path = config.model.path
        self._engine = EmbeddedEngine.from_config(path, dtype, rows, device, check_stop)
        weights = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
        self._engine.load_weights([list(weights.items())], 0)

    def answers(self, batches: Iterable[list[GenerationRequest]]) -> Iterator[Answer]:
        """See `AskedModel`."""
        for batch in batches:
            yield from self._engine.generate(batch)


def model_fingerprint(folder: Path) -> str:
    """Tells checkpoints apart without reading all of them: a hash of the configuration, and of name, size, first and
    last MiB of each weight file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_PIECE_BYTES))
            opened.seek(max(size - _PIECE_BYTES, 0))
            digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()
