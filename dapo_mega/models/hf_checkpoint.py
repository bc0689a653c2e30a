"""Reads tensors by Hugging Face name from safetensors checkpoints, and checks that a source has all tensors."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dapo_mega.atomic_files import check_regular, inside, read_json_object, refuse_lfs_pointer
from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily, PlacedTensor
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.models.layouts import BLOCKS, SCALES, from_mxfp4, part_name

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Beside each FP8 weight the scales of its blocks, under its name and this.
_FP8_SCALES, _FP8_BLOCK = "_scale_inv", 128
_WEIGHT_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
# Written by old versions of transformers, never read.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
# Where vision models keep their language model's tensors, and those of its tensors that belong to it.
_LANGUAGE = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(?=(?:layers|embed_tokens|norm)\.)")
_HEAD = re.compile(r"language_model\.(?=(?:lm_head|score)\.)")
_MTP = "mtp."
_OF_LANGUAGE = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "score.", _MTP)
_VISION = re.compile(r"(?:model\.)?(?:language_model|visual|vision_tower|vision_model)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NUM_NAMED = 8
_LONGEST_POINTER = 1024
# Tensors that config.json may demand beyond those that are stored, for all of them to be listed and the first be named.
_FACTOR_TOO_MANY, _ALWAYS_LISTED = 4, 20_000


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorSource(Protocol):
    """A checkpoint, in whatever format, that gives tensors under their Hugging Face names."""

    path: Path

    def names(self) -> set[str]:
        """All tensors of the checkpoint; one without a Hugging Face name is listed under its own name."""

    def weight_files(self) -> set[str]:
        """The files that tensors are read from, relative to `path`."""

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of the tensor, without reading its values."""

    def tensor(self, name: str) -> Tensor:
        """The whole tensor. Raises InputError naming the file if it is missing or damaged."""


class HfCheckpoint:
    """Reads single tensors of a Hugging Face safetensors checkpoint. Errors name the file and the tensor.

    A tensor is a view of its file, which stays mapped as long as the tensor lives: of one that is cut, only the part
    that is used is read from disk. Of a vision model only the language model's tensors are listed, under the names that
    they have in a checkpoint of their own; of stacked experts each expert's part, dequantized if it is in MXFP4. FP8
    weights with scales of their blocks are listed and read as bf16.
    """

    def __init__(self, path: Path, files: Iterable[str] = (), *, splits_mtp: bool = False) -> None:
        """Opens all files, or those named, which checks that their headers are sound and that they have the lengths the
        headers say. Stacked experts of multi-token prediction are one tensor unless `splits_mtp`."""
        self.path = path
        listed = {name: file for file in files for name in _specs(path / file)} or _read_index(path)
        held = {file: _specs(path / file) for file in sorted(set(listed.values()))}
        places = {name: file for file, specs in held.items() for name in specs}
        self._stored = _language_names(places)
        self._files = {name: places[stored] for name, stored in self._stored.items()}
        stored = {name: held[file][self._stored[name]] for name, file in self._files.items()}
        self._parts, self._specs = _split_experts(stored, splits_mtp)
        fp8 = [name for name, spec in self._specs.items() if spec.dtype is torch.float8_e4m3fn]
        self._scaled = {name for name in fp8 if name + _FP8_SCALES in self._specs}
        for name in self._scaled:
            shape, scales = self._specs[name].shape, self._specs.pop(name + _FP8_SCALES).shape
            if scales != tuple(-(-size // _FP8_BLOCK) for size in shape) or len(shape) != 2:
                raise InputError(
                    f"{path} has scales {scales} for the FP8 weight {name} {shape}; only one for each block of "
                    f"{_FP8_BLOCK} x {_FP8_BLOCK} is read: convert the checkpoint to bfloat16 first"
                )
            self._specs[name] = TensorSpec(shape, torch.bfloat16)
        self.num_left_out = len(places) - len(self._files)
        wrong = [name for name, file in listed.items() if places.get(name) != file]
        if wrong:
            raise InputError(
                f"{path / INDEX_FILE} lists {_listed(wrong)}, which the named files do not hold; copy the checkpoint "
                f"again"
            )

    def names(self) -> set[str]:
        return set(self._specs)

    def weight_files(self) -> set[str]:
        return set(self._files.values())

    def spec(self, name: str) -> TensorSpec:
        self._check_present(name)
        return self._specs[name]

    def tensor(self, name: str) -> Tensor:
        self._check_present(name)
        if name in self._scaled:
            return _from_fp8(self._read(name, ...), self._read(name + _FP8_SCALES, ...))
        stack, index = self._parts.get(name, (name, ...))
        if not stack.endswith(BLOCKS):
            return self._read(stack, index)
        return from_mxfp4(self._read(stack, index), self._read(stack.removesuffix(BLOCKS) + SCALES, index))

    def _read(self, name: str, index: Any) -> Tensor:
        file = self.path / self._files[name]
        try:
            # Pages of a file that stayed open would count as this process's memory until the end.
            opened, stored = _open(file), self._stored[name]
            tensor: Tensor = opened.get_tensor(stored) if index is ... else opened.get_slice(stored)[index]
        except SafetensorError as error:
            raise InputError(f"tensor {name!r} cannot be read from {file} ({error})") from error
        return tensor

    def _check_present(self, name: str) -> None:
        if name not in self._specs:
            raise InputError(f"{self.path} lacks the tensor {name!r}; is it a checkpoint of another model?")


def _from_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """FP8 `weight` [rows, columns] times the float32 scale of each block, in bf16: as DeepSeek-V3's published
    `inference/fp8_cast_bf16.py` computes it."""
    scales = scales.float()
    for axis in (0, 1):
        scales = scales.repeat_interleave(_FP8_BLOCK, axis).narrow(axis, 0, weight.shape[axis])
    return (weight.float() * scales).to(torch.bfloat16)


def _language_names(stored: Collection[str]) -> dict[str, str]:
    """The stored name of each tensor by the name it goes by here."""
    if not any(map(_VISION.match, stored)):
        return {name: name for name in stored}
    names: dict[str, str] = {}
    for old in stored:
        name = _HEAD.sub("", _LANGUAGE.sub("model.", old))
        if name.startswith(_OF_LANGUAGE) and (other := names.setdefault(name, old)) != old:
            raise InputError(
                f"the vision model stores {name} twice, as {other} and {old}; remove the wrong one of them"
            )
    return names


def _split_experts(
    stored: Mapping[str, TensorSpec], splits_mtp: bool
) -> tuple[dict[str, tuple[str, Any]], dict[str, TensorSpec]]:
    """Each expert's part of a stack, as (name of the stack, index in it), and what all tensors are then. Experts
    without biases go by the names of those that are stored one by one."""
    parts: dict[str, tuple[str, Any]] = {}
    specs = dict(stored)
    for name, spec in stored.items():
        stack, one = name, TensorSpec(spec.shape[1:], spec.dtype)
        if name.endswith(BLOCKS) and len(spec.shape) == 4:
            stack, (experts, rows, groups, width) = name.removesuffix(BLOCKS), spec.shape
            scales = specs.get(stack + SCALES)
            if scales != TensorSpec((experts, rows, groups), torch.uint8) or spec.dtype != torch.uint8:
                continue
            del specs[stack + SCALES]
            one = TensorSpec((2 * width * groups, rows), torch.bfloat16)
        if not part_name(stack, 0) or not spec.shape or (name.startswith(_MTP) and not splits_mtp):
            continue
        del specs[name]
        has_biases = stack.endswith("_bias") or f"{stack}_bias" in stored
        for expert in range(spec.shape[0]):
            part = str(part_name(stack, expert))
            if has_biases or len(one.shape) != 2:
                parts[part], specs[part] = (name, expert), one
                continue
            kinds = [part.replace("gate_up", kind) for kind in ("gate", "up")] if "gate_up" in part else [part]
            rows = one.shape[0] // len(kinds)
            for index, kind in enumerate(kinds):
                parts[f"{kind}.weight"] = name, (expert, slice(index * rows, (index + 1) * rows))
                specs[f"{kind}.weight"] = TensorSpec((rows, one.shape[1]), one.dtype)
    if twice := parts.keys() & stored.keys():
        raise InputError(
            f"the checkpoint stores {_listed(twice)} alone and in a stack of experts; remove one of the two"
        )
    return parts, specs


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from the index or from the only file."""
    index = path / INDEX_FILE
    if index.exists():
        listed = read_json_object(index).get("weight_map")
        if not isinstance(listed, dict):
            raise InputError(f"{index} is not a valid safetensors index (no weight_map); copy the checkpoint again")
        wrong = [name for name, file in listed.items() if not isinstance(file, str)]
        if wrong:
            raise InputError(f"{index} lists {_listed(wrong)} with no name of a file; copy the checkpoint again")
        outside = {file for file in listed.values() if not inside(file)}
        if outside:
            raise InputError(
                f"{index} lists files outside of its folder: {_listed(outside)}; correct it so that it names files of "
                f"the checkpoint, and put them there"
            )
        return listed
    if os.path.lexists(path / SINGLE_FILE):
        return dict.fromkeys(_open(path / SINGLE_FILE).keys(), SINGLE_FILE)
    if any(path.glob("pytorch_model*.bin")):
        raise InputError(
            f"{path} holds its weights as pytorch_model*.bin, and only safetensors are read; load the model with "
            f"transformers' from_pretrained and write it to another folder with save_pretrained"
        )
    raise InputError(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _specs(file: Path) -> dict[str, TensorSpec]:
    """Dtype and shape of each tensor in the file."""
    handle = _open(file)
    parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    wrong = [f"{name} {part.get_dtype()}" for name, part in parts.items() if part.get_dtype() not in _DTYPES]
    if wrong:
        raise InputError(
            f"{file} has the unsupported dtypes {_listed(wrong)}; save the model in float32, float16 or bfloat16"
        )
    return {name: TensorSpec(tuple(part.get_shape()), _DTYPES[part.get_dtype()]) for name, part in parts.items()}


def _open(file: Path) -> Any:
    """Raises InputError with the cause, which safetensors' own errors often do not tell."""
    check_regular(file)
    try:
        with file.open("rb") as stream:
            refuse_lfs_pointer(file, stream.read(_LONGEST_POINTER))
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        remedy = "correct its permissions" if isinstance(error, PermissionError) else "copy the checkpoint again"
        raise InputError(f"{file} cannot be read as safetensors ({reason}); {remedy}") from error


def all_tensors(family: ModelFamily, arch: Architecture) -> Iterator[PlacedTensor]:
    """Every parameter of the whole model, in checkpoint order."""
    return family.tensors(arch, range(arch.num_layers), True, True)


def check_count(path: Path, family: ModelFamily, arch: Architecture, num_stored: int) -> None:
    """Raise InputError if config.json demands so many more tensors than are stored that listing them takes long."""
    expected = family.num_tensors(arch)
    if expected > _FACTOR_TOO_MANY * num_stored + _ALWAYS_LISTED:
        raise InputError(
            f"{path} holds {num_stored:,} tensors where config.json (num_hidden_layers={arch.num_layers}"
            + (f", {arch.experts.number} experts" if arch.experts else "")
            + f") demands {expected:,}; correct it, or copy the checkpoint again"
        )


def check_source(source: TensorSource, family: ModelFamily, arch: Architecture) -> None:
    """Raise InputError that names the tensors if `source` is not exactly a model of this family and these sizes."""
    names = source.names()
    check_count(source.path, family, arch, len(names))
    expected = {name for placed in all_tensors(family, arch) for name in placed.hf}
    present = {name for name in names if not _DERIVED.search(name)}
    _check_dtypes(source, expected & present)
    missing, additional = expected - present, present - expected
    if isinstance(source, HfCheckpoint) and source.num_left_out:
        logger.warning(
            "%s is a vision model: %d tensors beside its language model are left out, also of what is exported",
            source.path,
            source.num_left_out,
        )
    if family.mtp and (heads := mtp_names(additional, arch)):
        additional -= set(heads)
        if not arch.trains_mtp:
            logger.info("%s: %d tensors of multi-token prediction are kept, and not trained", source.path, len(heads))
    if arch.trains_mtp and (lacking := mtp_names(missing, arch)):
        raise InputError(
            f"model.train_mtp needs a layer of multi-token prediction, and {source.path} lacks {_listed(lacking)}; set "
            f"it to false, or give a model.path that has one"
        )
    if arch.tied_embeddings:
        additional -= _tied_copies(source, additional)
    problems = [f"lacks the tensors {_listed(missing)}"] if missing else []
    problems += [f"has the additional tensors {_listed(additional)}"] if additional else []
    copies = mtp_copies(present, arch) if arch.trains_mtp else {}
    problems += _wrong_shapes(source, {name: name for name in expected & present} | copies, arch)
    if problems:
        raise InputError(
            f"{source.path} {'; '.join(problems)}: config.json and the weights are of different models, or files are "
            f"missing; copy the checkpoint again"
        )


def mtp_names(names: Iterable[str], arch: Architecture) -> list[str]:
    """The tensors of multi-token-prediction layers: those under `mtp.`, and of layers beyond num_hidden_layers."""
    layers = {name: _LAYER.match(name) for name in sorted(names)}
    return [name for name, of in layers.items() if name.startswith(_MTP) or (of and int(of[1]) >= arch.num_layers)]


def mtp_copies(names: Iterable[str], arch: Architecture) -> dict[str, str]:
    """Those of `mtp_names` that are copies of the model's embedding or output layer, and what they are copies of."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    originals = {
        "embed_tokens.weight": embedding,
        "shared_head.head.weight": embedding if arch.tied_embeddings else output,
    }
    found = {name: originals.get(_LAYER.sub("", name)) for name in mtp_names(names, arch)}
    return {name: original for name, original in found.items() if original}


def _tied_copies(source: TensorSource, names: set[str]) -> set[str]:
    """The output layer that a checkpoint stores although its embeddings are tied."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if output not in names or embedding not in source.names():
        return set()
    if not same_bits(source.tensor(output), source.tensor(embedding)):
        raise InputError(
            f"{source.path}: {output} differs from {embedding} although config.json ties them; set "
            f"tie_word_embeddings to false or remove the tensor"
        )
    return {output}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality of dtype, shape and bytes: NaN equals itself, and 0.0 is not -0.0."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _check_dtypes(source: TensorSource, names: set[str]) -> None:
    """Called before the comparison of names: the scales of quantised weights would only count as additional tensors."""
    wrong = {name: spec.dtype for name in names if (spec := source.spec(name)).dtype not in _WEIGHT_DTYPES}
    if not wrong:
        return
    if unscaled := {f"{name}{_FP8_SCALES}" for name, dtype in wrong.items() if dtype is torch.float8_e4m3fn}:
        raise InputError(
            f"{source.path} lacks {_listed(unscaled)}, the scales of FP8 weights; copy the checkpoint again, or "
            f"convert it to bfloat16 first"
        )
    quantised = any(dtype.itemsize == 1 for dtype in wrong.values())
    raise InputError(
        f"{source.path} has the unsupported dtypes {_listed([f'{name} {dtype}' for name, dtype in wrong.items()])}: "
        + ("quantised weights are not read; convert the checkpoint to bfloat16 first" if quantised else "")
        + ("" if quantised else "save the model in float32, float16 or bfloat16")
    )


def _wrong_shapes(source: TensorSource, names: Mapping[str, str], arch: Architecture) -> list[str]:
    """Of tensors, given with those whose shapes they are to have."""
    shapes = [
        f"{name} {found} instead of {expected}"
        for name, like in names.items()
        if (found := source.spec(name).shape) != (expected := hf_shape(like, arch))
    ]
    return [f"has the shapes {_listed(shapes)}"] if shapes else []


def _listed(items: list[str] | set[str]) -> str:
    """The first few, for an error message."""
    ordered = sorted(items)
    more = len(ordered) - _NUM_NAMED
    return ", ".join(ordered[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
