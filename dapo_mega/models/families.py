"""The table of one model family, and the look-up of the family a checkpoint belongs to.

Adding a family means adding one file to this folder, such as `qwen2.py`. It defines `FAMILY`, a `ModelFamily` with

- `model_type` as the family's `config.json` spells it;
- `read`, which makes an `Architecture` of `config.json`: `hf_sizes.common_sizes` reads what families write alike, given
  the values that transformers' configuration class of the family has for keys left out; what the policy does not
  compute must be refused with an error that names it;
- the rules of its tensors, most of them from `decoder_rules`. A parameter of the policy without a rule, and a rule
  without a tensor in the checkpoint, are errors when a model is loaded;
- `shapes` of those of its tensors whose names `hf_shapes` does not know.

The file is found by itself. Add a maker of tiny models to `tests/distributed/tiny.py`, and the tests compare the family
with transformers in every layout.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dapo_mega.atomic_files import read_json_object, refuse_special_files
from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Architecture, Experts, GatedDelta, LatentAttention
from dapo_mega.models.config_values import check_values
from dapo_mega.models.layouts import ShardRule
from dapo_mega.models.unsupported import refusal

MEGATRON_LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
"""How the names of a layer's tensors begin."""
_MTP_LAYER = "mtp.layers.0."

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by the names of tensors without `model.`, `layers.` and the numbers of layers and experts."""

LayerKind = Literal["all", "attention", "delta", "dense", "experts"]
"""Layers with attention or with a gated delta rule, and with an MLP or with a mixture of experts."""


@dataclass(frozen=True)
class TensorRule:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `megatron` lists the names the parameter has under the local and the Transformer Engine layers (the latter
    fuse a norm into the linear layer behind it). `{layer}` stands for the global layer number, `{expert}` for the
    global number of an expert. `applies` tells which models have the parameter, and `layers` which of their layers.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: ShardRule
    applies: Callable[[Architecture], bool] = lambda arch: True
    layers: LayerKind = "all"

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
    layout: ShardRule
    expert: int | None = None


EMBEDDING = (TensorRule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), ShardRule.VOCAB),)
"""What all families have before their layers."""

OUTPUT = (
    TensorRule(("decoder.final_layernorm.weight",), ("model.norm.weight",), ShardRule.REPLICATED),
    TensorRule(
        ("output_layer.weight",),
        ("lm_head.weight",),
        ShardRule.VOCAB,
        applies=lambda arch: not arch.tied_embeddings and not arch.has_value_head,
    ),
    TensorRule(
        ("output_layer.weight",), ("score.weight",), ShardRule.REPLICATED, applies=lambda arch: arch.has_value_head
    ),
    TensorRule(("output_layer.bias",), ("score.bias",), ShardRule.REPLICATED, applies=lambda arch: arch.value_bias),
)
"""The final norm and the output layer: of the vocabulary, or of a value model."""


@dataclass(frozen=True)
class MtpNames:
    """What a family's checkpoints call a layer of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2):
    the decoder layer in it by the beginning of its names, and the norms of embeddings and of hidden states, the
    projection of both together, and the norm behind the layer. `{layer}` stands for the number after the last layer's.
    """

    decoder_layer: str
    outside: tuple[str, str, str, str]

    @property
    def rules(self) -> tuple[TensorRule, ...]:
        """Of what is outside the decoder layer."""
        kinds = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        layouts = {"eh_proj": ShardRule.COLUMN}
        return tuple(
            TensorRule((f"{_MTP_LAYER}{kind}.weight",), (name,), layouts.get(kind, ShardRule.REPLICATED))
            for kind, name in zip(kinds, self.outside, strict=True)
        )

    def of_decoder_layer(self, rule: TensorRule) -> TensorRule:
        """The rule of a decoder layer as it is of the one in here."""
        # Megatron-Core 0.19 calls it otherwise, but not in checkpoints.
        megatron = (
            name.replace(MEGATRON_LAYER, f"{_MTP_LAYER}{own}.")
            for own in ("transformer_layer", "mtp_model_layer")
            for name in rule.megatron
        )
        hf = tuple(name.replace(HF_LAYER, self.decoder_layer) for name in rule.hf)
        return replace(rule, megatron=tuple(megatron), hf=hf)


MTP_AS_LAST_LAYER = MtpNames(
    HF_LAYER,
    (
        HF_LAYER + "enorm.weight",
        HF_LAYER + "hnorm.weight",
        HF_LAYER + "eh_proj.weight",
        HF_LAYER + "shared_head.norm.weight",
    ),
)
"""DeepSeek's and GLM's names."""
MTP_APART = MtpNames(
    "mtp.layers.0.",
    ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight"),
)
"""Qwen's names."""


@dataclass(frozen=True)
class ModelFamily:
    """Everything that distinguishes one family: how its config reads and where its tensors go."""

    model_type: str
    read: Callable[[Mapping[str, Any]], Architecture]
    per_layer: tuple[TensorRule, ...]
    before_layers: tuple[TensorRule, ...] = EMBEDDING
    after_layers: tuple[TensorRule, ...] = OUTPUT
    mtp: MtpNames | None = None
    """The names of the layers of multi-token prediction that checkpoints may have."""
    has_token_classifier: bool = True
    """Whether transformers has a token classifier of the family, which value models are exported as."""
    class_prefix: str = ""
    """How the names of transformers' classes begin, where it is not `model_type` with capitals."""
    shapes: Callable[[Architecture], Shapes] = lambda arch: {}
    """Shapes of the tensors whose names are the family's own."""

    @property
    def class_name(self) -> str:
        """How the names of transformers' classes begin."""
        return self.class_prefix or "".join(part.capitalize() for part in self.model_type.split("_"))

    def with_mtp(self, arch: Architecture) -> Architecture:
        """The model with a layer of multi-token prediction that learns. Raises InputError if the family has none."""
        if self.mtp is None:
            having = [family.model_type for family in families().values() if family.mtp]
            raise InputError(
                f"model.train_mtp=true needs layers of multi-token prediction, which {self.model_type} has not; set it "
                f"to false, or train one of {', '.join(having)}"
            )
        return replace(arch, trains_mtp=True)

    def tensors(self, arch: Architecture, layers: range, first_stage: bool, last_stage: bool) -> Iterator[PlacedTensor]:
        """All parameters of a model chunk that holds `layers`, in checkpoint order.

        With tied embeddings the output layer is not listed: it has no tensor of its own.
        """
        if first_stage:
            yield from self._outside_layers(arch, self.before_layers)
        per_layer = [rule for rule in self.per_layer if rule.applies(arch)]
        for layer in layers:
            yield from _of_layer(per_layer, arch, layer)
        if last_stage:
            yield from self._outside_layers(arch, self.after_layers)
        if last_stage and arch.trains_mtp:
            assert self.mtp
            rules = (*self.mtp.rules, *map(self.mtp.of_decoder_layer, per_layer))
            yield from _of_layer(rules, arch, arch.num_layers)

    def num_tensors(self, arch: Architecture) -> int:
        """How many Hugging Face tensors `tensors` lists for the whole model, counted without listing them."""
        experts = arch.experts
        layers = range(arch.num_layers + arch.trains_mtp)
        kinds = Counter(kind for layer in layers for kind in _kinds(arch, layer))
        outside = (rule for rule in (*self.before_layers, *self.after_layers) if rule.applies(arch))
        count = sum(len(rule.hf) for rule in outside) + len(self.mtp.rules if self.mtp and arch.trains_mtp else ())
        for rule in (rule for rule in self.per_layer if rule.applies(arch)):
            count += len(rule.hf) * kinds[rule.layers] * (experts.number if experts and rule.per_expert else 1)
        return count

    @staticmethod
    def _outside_layers(arch: Architecture, rules: tuple[TensorRule, ...]) -> Iterator[PlacedTensor]:
        return (PlacedTensor(rule.megatron, rule.hf, rule.layout) for rule in rules if rule.applies(arch))


def _of_layer(rules: Iterable[TensorRule], arch: Architecture, layer: int) -> Iterator[PlacedTensor]:
    kinds = _kinds(arch, layer)
    for rule in rules:
        if rule.layers not in kinds:
            continue
        if rule.per_expert:
            assert arch.experts
            yield from (rule.placed(layer, expert) for expert in range(arch.experts.number))
        else:
            yield rule.placed(layer)


def _kinds(arch: Architecture, layer: int) -> tuple[LayerKind, ...]:
    mixes: LayerKind = "delta" if arch.has_delta(layer) else "attention"
    return ("all", mixes, "experts" if arch.has_experts(layer) else "dense")


@cache
def families() -> Mapping[str, ModelFamily]:
    """All families by `model_type`: every module of this folder that defines `FAMILY`."""
    package = importlib.import_module(__package__)
    names = [found.name for found in pkgutil.iter_modules(package.__path__, f"{__package__}.")]
    modules = [vars(importlib.import_module(name)) for name in names]
    return {module["FAMILY"].model_type: module["FAMILY"] for module in modules if "FAMILY" in module}


def find_family(model_type: str) -> ModelFamily:
    """The table of a `model_type` that has one."""
    return families()[model_type]


# What vision models name the part of theirs that computes what a family does, given text only.
_LANGUAGE_MODELS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
# Keys that vision models may have beside the language model's own.
_BESIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "dtype", "torch_dtype")


def language_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `config.json` of the language model in a vision model, without images; any other is returned as it is."""
    if "vision_config" not in raw:
        return raw
    nested = raw.get("text_config")
    if isinstance(nested, dict):
        text = {**{key: raw[key] for key in _BESIDE if key in raw}, **nested}
        text |= {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
    else:
        text = {key: value for key, value in raw.items() if not key.startswith(("vision", "image", "video"))}
    kind = str(text.get("model_type"))
    text["model_type"] = kind = _LANGUAGE_MODELS.get(kind, kind)
    if kind in families():
        text["architectures"] = [f"{find_family(kind).class_name}ForCausalLM"]
    for record in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(record), dict) and "mrope_section" in rope:
            # The positions of text are alike in all sections.
            rope = {key: "default" if value == "mrope" else value for key, value in rope.items()}
            text[record] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return text


def read_config(folder: Path) -> Mapping[str, Any]:
    """`language_config` of the checkpoint in a folder."""
    return language_config(read_json_object(folder / "config.json"))


def load_architecture(path: Path) -> tuple[ModelFamily, Architecture]:
    """Read the family and the sizes of the Hugging Face checkpoint in folder `path`."""
    file = path / "config.json"
    if path.is_dir():
        refuse_special_files(path)
    if not os.path.lexists(file):
        raise InputError(f"{path} holds no config.json; give a folder with a Hugging Face checkpoint")
    return read_architecture(file)


def read_architecture(file: Path) -> tuple[ModelFamily, Architecture]:
    """Read the family and the sizes of a `config.json`. Raises InputError naming the file and the key."""
    raw = language_config(read_json_object(file))
    if raw.get("model_type") not in families():
        raise InputError(f"{file}: {refusal(raw, families())}")
    family = find_family(raw["model_type"])
    try:
        check_values(raw)
        arch = family.read(raw)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except KeyError as error:
        raise InputError(f"{file} lacks the key {error}; copy the checkpoint again") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{file} holds a value that no {family.model_type} model has ({error}); correct it") from error
    for part in (arch, arch.experts, arch.latent_attention, arch.gated_delta):
        _check_sizes(part, file)
    try:
        arch.check_sizes()
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return family, arch


def _check_sizes(part: Architecture | Experts | LatentAttention | GatedDelta | None, file: Path) -> None:
    sizes = {field.name: getattr(part, field.name) for field in fields(part) if field.type == "int"} if part else {}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise InputError(f"{file} makes {name}={size!r}, not a positive whole number; correct it")
