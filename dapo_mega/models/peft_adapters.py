"""LoRA adapters as peft stores them: which layers of a model have one, under which names, in which files."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo_mega.atomic_files import read_json_object, replace_file
from dapo_mega.config.lora import ALL_LINEAR, LoraConfig
from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily, PlacedTensor
from dapo_mega.models.hf_checkpoint import HfCheckpoint, all_tensors
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.models.hf_writer import save_shard
from dapo_mega.models.layouts import ROWS, ShardRule, stack_name
from dapo_mega.models.megatron_format.files import ADAPTER_CONFIG_FILE

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
# Not embeddings, the output layer, norms, routers, convolutions, biases.
_LINEAR = re.compile(r"_proj(_\w+)?\.weight$|\.experts\.\d+\.\w+_proj$")
_WEIGHT = re.compile(r"\.weight(\d*)$")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")
# A and B of an expert whose weights are no modules but parts of a stack: their names end without `.weight`.
_OF_STACK = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate_up|down)_proj\.(lora_[AB])")
_LAYOUT_OF_B = {
    **dict.fromkeys(ROWS, ShardRule.REPLICATED),
    ShardRule.TRANSPOSED_INTERLEAVED_GATE_UP: ShardRule.INTERLEAVED_GATE_UP,
}
# What peft's configuration may hold that changes what an adapter computes, with the values that it has without.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


class AdapterSource(Protocol):
    """Gives A and B by their `peft_name`."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight whose layer has adapters; `parts` are the indices of the targets among the tensors it is made of."""

    placed: PlacedTensor
    parts: tuple[int, ...]

    @property
    def is_row(self) -> bool:
        """Whether tensor parallelism cuts the layer's inputs, not its outputs."""
        return self.placed.layout in ROWS

    @property
    def is_cut(self) -> bool:
        """Whether tensor parallelism cuts the layer at all, as it does not what makes latent vectors."""
        return self.placed.layout is not ShardRule.REPLICATED

    def factors(self) -> Iterator[PlacedTensor]:
        """An A [rank, in] of each target, then B [out, rank] of all parts together, cut as the weight is."""
        cut_a = ShardRule.ROW if self.is_row else ShardRule.REPLICATED
        for part in self.parts:
            yield self._factor(f"A{part}", (peft_name(self.placed.hf[part], "A"),), cut_a)
        names = tuple(peft_name(name, "B") for name in self.placed.hf)
        yield self._factor("B", names, _LAYOUT_OF_B.get(self.placed.layout, self.placed.layout))

    def _factor(self, name: str, hf: tuple[str, ...], layout: ShardRule) -> PlacedTensor:
        # `linear_fc1.weight3` is the weight of one expert in a grouped layer.
        megatron = (
            _WEIGHT.sub(lambda found: f".lora.{found[1]}{'.' * bool(found[1])}{name}", weight)
            for weight in self.placed.megatron
        )
        return PlacedTensor(tuple(megatron), hf, layout, self.placed.expert)


def adapted(tensors: Iterable[PlacedTensor], targets: Collection[str]) -> list[AdaptedWeight]:
    """Those of the weights that have adapters."""
    found = []
    for placed in tensors:
        if _LINEAR.search(placed.hf[0]):
            parts = tuple(i for i, name in enumerate(placed.hf) if _is_target(name, targets))
            found += [AdaptedWeight(placed, parts)] if parts else []
    return found


def factors(tensors: Iterable[PlacedTensor], targets: Collection[str]) -> Iterator[PlacedTensor]:
    """A and B of all of them. Of experts, as of weights, one factor of all experts, then the next."""
    for _, together in itertools.groupby(
        adapted(tensors, targets), lambda weight: _EXPERT.sub("", weight.placed.hf[0])
    ):
        for of_all in zip(*(weight.factors() for weight in together), strict=True):
            yield from of_all


def factor_shape(name: str, arch: Architecture, rank: int) -> tuple[int, int]:
    """The shape of an A or B by its `peft_name`."""
    rows, columns = hf_shape(_weight_name(name), arch)
    if _OF_STACK.fullmatch(name):
        rows, columns = columns, rows
    return (rank, columns) if ".lora_A" in name else (rows, rank)


def trained_names(family: ModelFamily, arch: Architecture, targets: Collection[str]) -> set[str]:
    """The `peft_name` of all A and B of the model."""
    return {
        peft_name(weight.placed.hf[part], factor)
        for weight in adapted(all_tensors(family, arch), targets)
        for part in weight.parts
        for factor in "AB"
    }


def check_lora(lora: LoraConfig, family: ModelFamily, arch: Architecture, *, is_here: bool = True) -> None:
    """Raise InputError for adapters that the model cannot have, or, where it `is_here`, another adapter than that in
    `lora.path`."""
    linear = [name for weight in adapted(all_tensors(family, arch), (ALL_LINEAR,)) for name in weight.placed.hf]
    for target in lora.targets:
        if not any(_is_target(name, (target,)) for name in linear):
            kinds = sorted({_module(name).rpartition(".")[2] for name in linear})
            raise InputError(
                f"lora.targets: {target!r} is no linear layer of {arch.model_type} that can have an adapter; choose "
                f"among {', '.join(kinds)}, or {ALL_LINEAR}"
            )
    # What a gated delta layer projects to is one layer of Megatron's, of which some tensors have a row per head.
    whole = [name for name in linear if _is_target(name, lora.targets) and ".linear_attn.in_proj" not in name]
    smallest = min(whole, key=lambda name: min(hf_shape(name, arch)), default=None)
    if smallest and lora.rank > min(hf_shape(smallest, arch)):
        rows, columns = hf_shape(smallest, arch)
        raise InputError(
            f"lora.rank={lora.rank} is larger than {smallest.removesuffix('.weight')}, which is {rows} x {columns}; "
            f"set it to at most {min(rows, columns)}"
        )
    if lora.send == "adapters":
        _check_sent(lora, family, arch)
    if lora.path and is_here:
        PeftAdapter(Path(lora.path), lora, family, arch)


def _check_sent(lora: LoraConfig, family: ModelFamily, arch: Architecture) -> None:
    """Raise InputError for adapters that SGLang cannot take."""
    for weight in adapted(all_tensors(family, arch), lora.targets):
        if arch.latent_attention or ".linear_attn." in weight.placed.hf[0]:
            layer = weight.placed.hf[0].removesuffix(".weight")
            raise InputError(f"lora.send=adapters with {layer} is not supported yet; set lora.send=merged")
        if weight.placed.expert is not None:
            raise InputError("lora.send=adapters with adapters of experts is not supported yet; set lora.send=merged")
        if len(weight.parts) < len(weight.placed.hf):
            parts = ", ".join(name.split(".")[-2] for name in weight.placed.hf)
            raise InputError(
                f"lora.send=adapters: in engines {parts} are one layer, of which lora.targets={list(lora.targets)} "
                f"leaves a part out; name all or none of them, or set lora.send=merged"
            )


class NewAdapter:
    """A at random in +-1 / sqrt(in), as peft's, and B of zeros: at first the model is that without adapters. Values
    depend on the seed and the name only, not on the layout."""

    def __init__(self, arch: Architecture, rank: int, seed: int) -> None:
        self._arch, self._rank, self._seed = arch, rank, seed

    def tensor(self, name: str) -> Tensor:
        shape = factor_shape(name, self._arch, self._rank)
        if ".lora_B" in name:
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(seed_of(f"{self._seed} {name}"))
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


class PeftAdapter:
    """The adapter in a folder of peft's."""

    def __init__(self, path: Path, lora: LoraConfig, family: ModelFamily, arch: Architecture) -> None:
        """Raises InputError for one that is not of `lora`, or not of a model of this family and these sizes."""
        self._arch, self._rank = arch, lora.rank
        self._num_experts = arch.experts.number if arch.experts else 1
        raw = read_json_object(
            path / ADAPTER_CONFIG_FILE, "give a folder that peft's save_pretrained wrote, or a run's adapter"
        )
        self._places = _places(trained_names(family, arch, lora.targets))
        places = {place for place, _ in self._places.values()}
        has_stacks = any(map(_OF_STACK.fullmatch, trained_names(family, arch, (ALL_LINEAR,))))
        for key, values in _PLAIN.items():
            if raw.get(key, values[0]) not in values and not (key == "target_parameters" and has_stacks):
                raise InputError(
                    f"{path / ADAPTER_CONFIG_FILE} has {key}={raw[key]!r}, which is not supported: only {values[0]!r} "
                    f"is; merge the adapter into its model with peft's merge_and_unload, and start from that"
                )
        for key, own in (("r", lora.rank), ("lora_alpha", lora.alpha)):
            if raw.get(key) != own:
                name = "lora.rank" if key == "r" else "lora.alpha"
                raise InputError(
                    f"{name}={own} but the adapter in {path} has {key}={raw.get(key)}; set {name}={raw.get(key)}"
                )
        self._file = HfCheckpoint(path, [WEIGHTS_FILE])
        if unlike := sorted(places ^ self._file.names()):
            which = "lacks" if unlike[0] in places else "has"
            parameters = f" and target_parameters, {raw['target_parameters']}" if raw.get("target_parameters") else ""
            raise InputError(
                f"{path / WEIGHTS_FILE} {which} {unlike[0]}{f' and {len(unlike) - 1} more' if unlike[1:] else ''}, "
                f"unlike an adapter of {arch.model_type} with lora.targets={list(lora.targets)}; set lora.targets to "
                f"the adapter's target_modules, {raw.get('target_modules')}{parameters}, or give an adapter of this "
                f"model"
            )
        for name, (place, expert) in sorted(self._places.items()):
            shape = self._file.spec(place).shape
            expected = factor_shape(name, arch, lora.rank * (1 if expert is None else self._num_experts))
            if shape != expected:
                raise InputError(
                    f"{path / WEIGHTS_FILE}: {place} is {list(shape)}, and for this model it would be "
                    f"{list(expected)}: the adapter is of another one; give an adapter that was trained on model.path"
                )

    def tensor(self, name: str) -> Tensor:
        """Zeros for a part of a layer that is not a target."""
        if name not in self._places:
            return torch.zeros(factor_shape(name, self._arch, self._rank))
        place, expert = self._places[name]
        tensor = self._file.tensor(place)
        if expert is None:
            return tensor
        if ".lora_A" in name:
            return tensor.chunk(self._num_experts)[expert]
        return tensor[:, expert :: self._num_experts]


def _places(names: Collection[str]) -> dict[str, tuple[str, int | None]]:
    """The name of the tensor that peft keeps each A or B in, and its expert's number if all experts' are in one: A one
    upon the other, columns of B in turn. Where peft has two stacks of a layer, the first is within the second."""
    places: dict[str, tuple[str, int | None]] = {}
    for name in names:
        places[name] = name, None
        if found := _OF_STACK.fullmatch(name):
            layer, expert, kind, factor = found.groups()
            is_within = kind == "gate_up" and f"{layer}{expert}.down_proj.{factor}" in names
            places[name] = f"{layer}{'base_layer.' * is_within}{factor}.weight", int(expert)
    return places


def peft_config(lora: LoraConfig, names: Iterable[str]) -> dict[str, Any]:
    """What peft has to know of an adapter with the tensors `names`. It refuses dropout beside stacks of experts, so of
    these it is told none."""
    weights = {_weight_name(name) for name in names}
    modules = {weight.split(".")[-2] for weight in weights if weight.endswith(".weight")}
    parameters = {".".join(_module(weight).split(".")[-3:]) for weight in weights if not weight.endswith(".weight")}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "target_modules": sorted(modules),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "bias": "none",
        "inference_mode": True,
    }


def write_config(folder: Path, lora: LoraConfig, names: Iterable[str], base: Path) -> None:
    """`adapter_config.json` of an adapter with the tensors `names`, trained on the model in `base`."""
    config = {**peft_config(lora, names), "base_model_name_or_path": str(base)}
    replace_file(folder / ADAPTER_CONFIG_FILE, json.dumps(config, indent=2))


def write_adapter(folder: Path, lora: LoraConfig, tensors: Mapping[str, Tensor], base: Path) -> None:
    """A folder that peft loads."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name, (place, expert) in sorted(_places(tensors).items()):
        parts.setdefault(place, {})[expert or 0] = tensors[name]
    whole = {}
    for place, of_experts in parts.items():
        ordered = [of_experts[expert] for expert in sorted(of_experts)]
        whole[place] = torch.cat(ordered) if ".lora_A" in place else torch.stack(ordered, dim=-1).flatten(1)
    folder.mkdir(parents=True)
    save_shard(whole, folder / WEIGHTS_FILE)
    write_config(folder, lora, tensors, base)


def seed_of(text: str) -> int:
    """A seed that another text does not have."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def peft_name(weight: str, factor: str) -> str:
    """The name of A or B of a layer by its weight's Hugging Face name: peft's, if the weight is no part of a stack."""
    module = weight.removesuffix(".weight")
    return f"{_PREFIX}{module}.lora_{factor}{weight.removeprefix(module)}"


def _weight_name(name: str) -> str:
    return re.sub(r"\.lora_[AB](?=\.weight$|$)", "", name.removeprefix(_PREFIX))


def _module(weight: str) -> str:
    """What peft's targets are ends of: the name of a weight's module, or of a stack."""
    return stack_name(weight).removesuffix(".weight")


def _is_target(weight: str, targets: Collection[str]) -> bool:
    """As peft: a target is the end of a module's name."""
    module = _module(weight)
    return ALL_LINEAR in targets or any(module == target or module.endswith(f".{target}") for target in targets)
