"""Opens a model on disk, a policy or a value model (critic), with its family, its sizes and its tensors.

On disk a value model is what transformers calls a token classifier with one label: the layers of a policy, and in place
of its output layer `score.weight` [1, hidden] and optionally `score.bias` [1].
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_mega.atomic_files import read_json_object
from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily, find_family, load_architecture, read_architecture, read_config
from dapo_mega.models.hf_checkpoint import HfCheckpoint, TensorSource, TensorSpec
from dapo_mega.models.megatron_format.files import (
    MegatronCheckpoint,
    MegatronFiles,
    is_megatron_folder,
    open_source,
    stores_mtp,
)

CRITIC_CONFIG_FILE = "critic_config.json"
"""The `config.json` of the value model that a checkpoint holds beside a policy."""

_EMBEDDING, _OUTPUT, _HEAD, _HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "score.weight", "score.bias"


@dataclass(frozen=True)
class StoredModel:
    """`config` is what `config.json` of an export holds, where that is not the source's."""

    family: ModelFamily
    arch: Architecture
    source: TensorSource
    config: Mapping[str, Any] | None = None


def open_any(path: Path, config_folder: Path) -> StoredModel:
    """The policy or the value model in a folder, whichever it is, with the config.json of another."""
    family, arch = load_architecture(config_folder)
    if head := stored_value_head(path):
        arch = arch.with_value_head(has_bias=_HEAD_BIAS in head)
    elif has_trained_mtp(path, family, arch):
        arch = family.with_mtp(arch)
    return StoredModel(family, arch, open_source(path, family, arch))


def has_trained_mtp(path: Path, family: ModelFamily, arch: Architecture) -> bool:
    """Whether a folder is a checkpoint of a run that trained a layer of multi-token prediction, or one like it."""
    return bool(family.mtp) and is_megatron_folder(path) and stores_mtp(MegatronFiles(path), family, arch)


def open_policy(path: Path, *, trains_mtp: bool = False) -> StoredModel:
    """The policy in a Hugging Face or Megatron folder; with `trains_mtp` also its layer of multi-token prediction."""
    family, arch = load_architecture(path)
    arch = family.with_mtp(arch) if trains_mtp else arch
    return StoredModel(family, arch, open_source(path, family, arch))


def open_value_model(path: Path) -> StoredModel:
    """The value model in a Hugging Face or Megatron folder, also the one beside a policy; of a folder with a policy
    only, its layers under a value head of zeros, so that every value is 0 at first."""
    if os.path.lexists(path / CRITIC_CONFIG_FILE):
        return open_critic(path)
    family, arch = load_architecture(path)
    head = stored_value_head(path)
    value_arch = arch.with_value_head(has_bias=_HEAD_BIAS in head)
    config = value_model_config(read_config(path), value_arch)
    if head:
        return StoredModel(family, value_arch, open_source(path, family, value_arch), config)
    return StoredModel(family, value_arch, _WithNewHead(open_source(path, family, arch), value_arch), config)


def open_critic(path: Path) -> StoredModel:
    """The value model that a training checkpoint holds beside the policy. Raises InputError if there is none."""
    file = path / CRITIC_CONFIG_FILE
    if not file.is_file():
        raise InputError(
            f"{path} holds no value model beside a policy; give a checkpoint of a run with algorithm.advantage=gae"
        )
    family, arch = read_architecture(file)
    has_bias = "output_layer.bias" in MegatronFiles(path, is_critic=True).tensors
    arch = arch.with_value_head(has_bias=has_bias)
    source = MegatronCheckpoint(path, family, arch, is_critic=True)
    return StoredModel(family, arch, source, value_model_config(read_json_object(file), arch))


def critic_architecture(path: Path) -> tuple[ModelFamily, Architecture]:
    """The layers of the value model that `open_value_model` would open, without looking at its weights."""
    file = path / CRITIC_CONFIG_FILE
    return read_architecture(file) if os.path.lexists(file) else load_architecture(path)


def value_model_config(config: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    """The `config.json` of a value model from that of the policy whose layers it has.

    Where transformers has no token classifier of the family, the file names the model without a head: its tensors have
    the same names, and the head is still in `score.weight`.
    """
    family = find_family(arch.model_type)
    kind = "ForTokenClassification" if family.has_token_classifier else "Model"
    return {
        **config,
        "architectures": [family.class_name + kind],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "classifier_dropout": 0.0,
        # Without it transformers adds a bias.
        "token_classification_bias": arch.value_bias,
    }


def stored_value_head(path: Path) -> frozenset[str]:
    """The names of the value head's tensors in a Hugging Face or Megatron folder; empty for a policy. In Megatron's
    format the head is an output layer for one token."""
    if not is_megatron_folder(path):
        names = HfCheckpoint(path).names()
        return frozenset({_HEAD, _HEAD_BIAS} & names) if _HEAD in names else frozenset()
    tensors = MegatronFiles(path).tensors
    if "output_layer.weight" not in tensors or tensors["output_layer.weight"].size[0] != 1:
        return frozenset()
    return frozenset({_HEAD, _HEAD_BIAS} if "output_layer.bias" in tensors else {_HEAD})


class _WithNewHead:
    """A policy's checkpoint as that of a value model whose head is zeros."""

    def __init__(self, policy: TensorSource, arch: Architecture) -> None:
        self.path = policy.path
        self._policy = policy
        self._shape = (1, arch.hidden_size)

    def names(self) -> set[str]:
        return (self._policy.names() - {_OUTPUT}) | {_HEAD}

    def weight_files(self) -> set[str]:
        return self._policy.weight_files()

    def spec(self, name: str) -> TensorSpec:
        if name == _HEAD:
            return TensorSpec(self._shape, self._policy.spec(_EMBEDDING).dtype)
        return self._policy.spec(name)

    def tensor(self, name: str) -> Tensor:
        if name == _HEAD:
            return torch.zeros(self._shape, dtype=self.spec(name).dtype)
        return self._policy.tensor(name)
