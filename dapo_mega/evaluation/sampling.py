"""Asks a model that is not trained: the interface, and the embedded engine."""

from pathlib import Path

import torch

from dapo_mega.distributed import accelerator
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.engines.embedded.fleet import EmbeddedFleet
from dapo_mega.engines.protocol import RolloutFleet
from dapo_mega.errors import InputError
from dapo_mega.evaluation.model_folder import model_weights


class Sampler(RolloutFleet):
    """Answers requests with the model. `engines` is what samples, with its version; `most_open` is as of
    `ask_in_parts`."""

    engines: tuple[str, ...]
    most_open: int


class EmbeddedSampler(EmbeddedFleet, Sampler):
    """Generates in this process, a part at a time: the tokens depend on the requests of the part, not on which parts
    went before."""

    engines = ("embedded",)
    most_open = 1

    def __init__(self, model: Path, dtype: str, max_batch_rows: int) -> None:
        """The model of a Hugging Face folder. Raises InputError for one that the engine cannot load."""
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        try:
            engine = EmbeddedEngine(model, kind, max_batch_rows, accelerator.device())
            engine.load_weights(model_weights(model, kind), 0)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"{model} cannot be loaded ({reason}); copy the checkpoint again") from error
        super().__init__(engine)
        self._model = engine

    def close(self) -> None:
        """Free the model's memory, too."""
        super().close()
        self._model.close()
