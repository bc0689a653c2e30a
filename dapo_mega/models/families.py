"""The table of one model family, and the look-up of the family a checkpoint belongs to.

Adding a family means adding one file beside `qwen2.py` that defines `FAMILY`, and naming it in `_FAMILIES`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.layouts import Layout

_FAMILIES = {"qwen2": "dapo_mega.models.qwen2", "qwen3_moe": "dapo_mega.models.qwen3_moe"}


@dataclass(frozen=True)
class TensorRule:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `megatron` lists the names the parameter has under the local and the Transformer Engine layers (the latter
    fuse a norm into the linear layer behind it). `{layer}` stands for the global layer number, `{expert}` for the
    global number of an expert.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.hf[0]

    def placed(self, layer: int, expert: int | None = None) -> PlacedTensor:
        """The rule applied to one layer (and expert): concrete names."""
        return PlacedTensor(
            tuple(name.format(layer=layer, expert=expert) for name in self.megatron),
            tuple(name.format(layer=layer, expert=expert) for name in self.hf),
            self.layout,
            expert,
        )


@dataclass(frozen=True)
class PlacedTensor:
    """One parameter by its concrete names; `expert` is the global number of the expert it belongs to, if any."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    expert: int | None = None


@dataclass(frozen=True)
class ModelFamily:
    """Everything that distinguishes one family: how its config reads and where its tensors go."""

    model_type: str
    read: Callable[[Mapping[str, Any]], Architecture]
    before_layers: tuple[TensorRule, ...]
    per_layer: tuple[TensorRule, ...]
    after_layers: tuple[TensorRule, ...]

    def tensors(self, arch: Architecture, layers: range, first_stage: bool, last_stage: bool) -> Iterator[PlacedTensor]:
        """All parameters of a model chunk that holds `layers`, in checkpoint order.

        With tied embeddings the output layer is not listed: it has no tensor of its own.
        """
        if first_stage:
            yield from (PlacedTensor(rule.megatron, rule.hf, rule.layout) for rule in self.before_layers)
        for layer in layers:
            for rule in self.per_layer:
                if rule.per_expert:
                    assert arch.experts
                    yield from (rule.placed(layer, expert) for expert in range(arch.experts.number))
                else:
                    yield rule.placed(layer)
        if last_stage:
            for rule in self.after_layers:
                if not (arch.tied_embeddings and rule.megatron == ("output_layer.weight",)):
                    yield PlacedTensor(rule.megatron, rule.hf, rule.layout)


def find_family(model_type: str) -> ModelFamily:
    """The table of a Hugging Face `model_type`; refuses families that have none."""
    if model_type not in _FAMILIES:
        raise InputError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(_FAMILIES))}")
    family: ModelFamily = importlib.import_module(_FAMILIES[model_type]).FAMILY
    return family


def load_architecture(path: Path) -> tuple[ModelFamily, Architecture]:
    """Read the family and the sizes of the Hugging Face checkpoint in folder `path`."""
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"{path} holds no config.json; model.path must be a folder with a Hugging Face checkpoint")
    try:
        raw = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{file} is not valid JSON ({error}); copy the checkpoint again") from error
    family = find_family(str(raw.get("model_type")))
    try:
        return family, family.read(raw)
    except KeyError as error:
        raise InputError(f"{file} lacks the key {error}; copy the checkpoint again") from error
