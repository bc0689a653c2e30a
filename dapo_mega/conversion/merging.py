"""The mean of several models' weights, tensor by tensor, as a checkpoint that is read like any other.

Kimi k1.5 merges a model of long thoughts with one of short ones (arXiv 2501.12599, section 2.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dapo_mega.conversion.convert import Checkpoint, to_hf
from dapo_mega.conversion.resumable_folder import fingerprint
from dapo_mega.conversion.verification import different_fields
from dapo_mega.errors import InputError
from dapo_mega.models.hf_checkpoint import TensorSource, TensorSpec


@dataclass
class _Mean:
    """Weighted means of the tensors of several sources, computed in float32 and given in the first one's dtype."""

    path: Path
    sources: Sequence[TensorSource]
    weights: Sequence[float]

    def names(self) -> set[str]:
        return self.sources[0].names()

    def weight_files(self) -> set[str]:
        return self.sources[0].weight_files()

    def spec(self, name: str) -> TensorSpec:
        return self.sources[0].spec(name)

    def tensor(self, name: str) -> Tensor:
        total = torch.zeros(self.spec(name).shape)
        for source, weight in zip(self.sources, self.weights, strict=True):
            total.add_(source.tensor(name).float(), alpha=weight)
        return total.to(self.spec(name).dtype)


def merge(checkpoints: Sequence[Checkpoint], weights: Sequence[float], target: Path, shard_bytes: int) -> bool:
    """Write the mean of checkpoints of one architecture, by weights that are divided by their sum, in Hugging Face's
    format with the first one's config.json and tokenizer; see `write_folder`.

    Raises InputError for weights that do not fit, and for models that differ in architecture or tensors.
    """
    if (
        len(weights) != len(checkpoints)
        or not all(0 <= weight < float("inf") for weight in weights)
        or not sum(weights)
    ):
        raise InputError(
            f"{len(checkpoints)} models need as many weights of 0 or more that are not all 0, got "
            f"{', '.join(f'{weight:g}' for weight in weights)}"
        )
    first, *others = checkpoints
    for other in others:
        differing = different_fields(first, other)
        missing = set(first.names).symmetric_difference(other.names)
        differing += [f"{min(missing)} is in one of them only"] if missing else []
        if differing:
            raise InputError(f"{first.path} and {other.path} cannot be merged: {differing[0]}")
    mean = _Mean(first.path, [each.source for each in checkpoints], [weight / sum(weights) for weight in weights])
    origin = {
        "weights": list(weights),
        "others": [fingerprint(each.path, each.source.weight_files()) for each in others],
    }
    return to_hf(replace(first, source=mean), target, shard_bytes, origin)
