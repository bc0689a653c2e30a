"""Converts whole checkpoints, one tensor at a time: Hugging Face to Megatron, back, and between layouts.

Values are copied unchanged between files, and no model is built.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from dapo_mega.atomic_files import disk_refusal, read_json_object, refuse_special_files, replace_file
from dapo_mega.checkpoints.folders import MANIFEST_FILE, find_damage, write_manifest
from dapo_mega.config import ParallelConfig
from dapo_mega.conversion.resumable_folder import Advance, OutputFile, OutputFolder, fingerprint, write_folder
from dapo_mega.errors import InputError
from dapo_mega.megatron.weights import ChunkLayout
from dapo_mega.models import Architecture, ModelFamily, ShardRule, take_shard
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.hf_checkpoint import HfCheckpoint, TensorSource, all_tensors, check_source, mtp_names
from dapo_mega.models.hf_writer import copy_config_and_tokenizer, save_shard, shard_files, write_index
from dapo_mega.models.layouts import DELTA, GATED, delta_sections, gate_and_up, stacked, stacks
from dapo_mega.models.megatron_format.entries import (
    Entry,
    cuts,
    delta_part,
    no_extra_state,
    stored_entries,
    stored_shape,
)
from dapo_mega.models.megatron_format.files import (
    CRITIC_PREFIX,
    MTP_STEM,
    OPTIMIZER_KEY,
    MegatronCheckpoint,
    MegatronFiles,
    is_megatron_folder,
    mtp_source,
)
from dapo_mega.models.megatron_format.pickles import COMMON_FILE, read_common
from dapo_mega.models.megatron_format.writing import Block, is_finite, owned, write_blocks, write_metadata
from dapo_mega.models.stored_model import CRITIC_CONFIG_FILE, open_any, open_critic

logger = logging.getLogger(__name__)

_LOOP_FILE = "loop.json"

_NUM_NAMED = 8

Item = TypeVar("Item")


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint of one model on disk; `companions` holds its config.json and tokenizer. `critic_config` is
    the config.json of a critic that lies beside a policy."""

    source: TensorSource
    companions: Path
    family: ModelFamily
    arch: Architecture
    critic_config: Mapping[str, Any] | None = None

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def is_training(self) -> bool:
        """Whether it has, or had before it was damaged, an optimizer and the state of a run."""
        return any((self.path / name).is_file() for name in (MANIFEST_FILE, _LOOP_FILE, "loop.npz"))

    @property
    def files(self) -> MegatronFiles:
        """The files of a checkpoint in Megatron's format."""
        assert isinstance(self.source, MegatronCheckpoint)
        return self.source.files

    def stored_key(self, key: str) -> str:
        """A key of `files` as it stands in a folder of a policy and its critic."""
        return key if self.critic_config is None else CRITIC_PREFIX + key

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {self.source.spec(name).dtype for name in self._own}

    @property
    def names(self) -> list[str]:
        """The Hugging Face names of all tensors, in checkpoint order, last those of multi-token prediction that are no
        part of the model."""
        return self._own + self.mtp_names

    @property
    def mtp_names(self) -> list[str]:
        return mtp_names(self.source.names() - set(self._own), self.arch)

    @property
    def _own(self) -> list[str]:
        return [name for placed in all_tensors(self.family, self.arch) for name in placed.hf]


def open_checkpoint(path: Path, model: Path | None = None, *, is_critic: bool = False) -> Checkpoint:
    """Open and check a checkpoint of either format; `model` is a folder with what one in Megatron's format may lack: a
    config.json, layers of multi-token prediction. With `is_critic` it is the critic beside the policy of a training
    checkpoint.

    Raises InputError that names missing or additional tensors and those of a wrong shape.
    """
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; give a Hugging Face or a Megatron checkpoint")
    refuse_special_files(path)
    companions = path if (path / "config.json").is_file() or model is None else model
    if not (companions / "config.json").is_file() and is_megatron_folder(path):
        raise InputError(
            f"{path} holds no config.json; give a folder that has one with --model, such as the run's model"
        )
    stored = open_critic(path) if is_critic else open_any(path, companions)
    given = model if model and any(model.glob("*.safetensors")) else None
    if given and isinstance(stored.source, MegatronCheckpoint) and stored.family.mtp and not is_critic:
        stored.source.mtp = stored.source.mtp or mtp_source(given, stored.arch)
    check_source(stored.source, stored.family, stored.arch)
    return Checkpoint(stored.source, companions, stored.family, stored.arch, stored.config)


def to_hf(
    checkpoint: Checkpoint, target: Path, shard_bytes: int, origin: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Write a checkpoint's weights as a Hugging Face one; see `write_folder`. `origin`: of what else they are made."""
    files, shards, nbytes = _hf_outputs(checkpoint, checkpoint.names, shard_bytes)

    def finish(folder: Path, records: Mapping[str, Any]) -> None:
        _warn_of_not_finite(checkpoint, [name for names in records.values() for name in names or ()])
        copy_config_and_tokenizer(checkpoint.companions, folder, checkpoint.dtypes, checkpoint.critic_config)
        write_index(folder, shards, nbytes)

    made_from = {**_made_from(checkpoint, "megatron-to-hf", shard_bytes), **origin}
    return write_folder(target, OutputFolder(made_from, files, finish))


def _hf_outputs(
    checkpoint: Checkpoint, names: Iterable[str], shard_bytes: int, stem: str = "model"
) -> tuple[list[OutputFile], list[list[str]], int]:
    """Safetensors files of these tensors, the names in each, and the bytes of all."""
    parts = stacks(names)
    sizes = {name: sum(checkpoint.source.spec(part).nbytes for part in of) for name, of in parts.items()}
    shards = list(_split(list(parts), sizes.__getitem__, shard_bytes))
    files = [
        OutputFile(
            file,
            sum(map(sizes.__getitem__, names)),
            partial(_write_shard, checkpoint.source, {name: parts[name] for name in names}),
        )
        for file, names in zip(shard_files(len(shards), stem), shards, strict=True)
    ]
    return files, shards, sum(sizes.values())


def _write_shard(source: TensorSource, parts: Mapping[str, list[str]], file: Path, advance: Advance) -> list[str]:
    """Write one file of tensors given with their parts; returns the names of those with NaN or infinite values."""
    tensors, not_finite = {}, []
    for name, of in parts.items():
        (tensors[name],) = map(owned, stacked(((part, source.tensor(part)) for part in of), len(of)))
        if not is_finite(tensors[name]):
            not_finite.append(name)
        advance(tensors[name].nbytes)
    try:
        save_shard(tensors, file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot write {file} ({disk_refusal(error) or error}); free space and start again") from error
    return not_finite


def _warn_of_not_finite(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Warn once of NaN and infinite values, which the conversion copies like all others."""
    found = list(dict.fromkeys(names))
    if found:
        logger.warning(
            "%s: %d tensors hold NaN or infinite values, which were copied: %s%s",
            checkpoint.path,
            len(found),
            ", ".join(found[:_NUM_NAMED]),
            f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else "",
        )


def _labels_of_not_finite(records: Mapping[str, Any]) -> list[str]:
    # Older records lack this field.
    return [item["label"] for items in records.values() for item in items if item.get("not_finite")]


def to_megatron(checkpoint: Checkpoint, target: Path, parallel: ParallelConfig, shard_bytes: int) -> bool:
    """Write a Hugging Face checkpoint as a Megatron one, cut for a layout; see `write_folder`."""
    entries = stored_entries(checkpoint.family, checkpoint.arch)
    _check_common_dtypes(checkpoint, entries)
    parts = [
        (file, block)
        for placed, files in _places(checkpoint, parallel)
        for file, block in _hf_blocks(checkpoint, placed, files, entries[placed])
    ]

    def finish(folder: Path, records: Mapping[str, Any]) -> None:
        _finish_megatron(checkpoint, folder, records, {})

    made_from = _made_from(checkpoint, "hf-to-megatron", shard_bytes, parallel)
    files = _megatron_outputs(checkpoint, parts, no_extra_state(entries), shard_bytes)
    return write_folder(target, OutputFolder(made_from, files, finish))


def reshard(checkpoint: Checkpoint, target: Path, parallel: ParallelConfig, shard_bytes: int) -> bool:
    """Rewrite a Megatron checkpoint for another layout, with optimizer, critic and loop state if it has them."""
    common = _read_common(checkpoint)
    models = [checkpoint]
    if has_critic := (checkpoint.path / CRITIC_CONFIG_FILE).is_file():
        models.append(open_checkpoint(checkpoint.path, is_critic=True))
    parts = [part for model in models for part in _resharded_blocks(model, parallel)]

    def finish(folder: Path, records: Mapping[str, Any]) -> None:
        if checkpoint.is_training:
            for content in (common, common["critic"]) if has_critic else (common,):
                content["optimizer"] = _regrouped(content["optimizer"], parallel.expert > 1, checkpoint.arch)
            _copy_loop_state(checkpoint.path, folder, 2 if parallel.expert > 1 else 1)
        _finish_megatron(checkpoint, folder, records, common)
        if checkpoint.is_training:
            write_manifest(folder)

    objects = {model.stored_key(key): data for model in models for key, data in model.files.read_objects().items()}
    made_from = _made_from(checkpoint, "reshard", shard_bytes, parallel)
    files = _megatron_outputs(checkpoint, parts, objects, shard_bytes)
    return write_folder(target, OutputFolder(made_from, files, finish))


def _finish_megatron(
    checkpoint: Checkpoint, folder: Path, records: Mapping[str, Any], common: Mapping[str, Any]
) -> None:
    blocks = {file: items for file, items in records.items() if not file.startswith(MTP_STEM)}
    beside = [name for file in records.keys() - blocks.keys() for name in records[file]]
    _warn_of_not_finite(checkpoint, _labels_of_not_finite(blocks) + beside)
    copy_config_and_tokenizer(checkpoint.companions, folder, checkpoint.dtypes)
    write_metadata(folder, blocks, common, checkpoint.arch.vocab_size)


def _resharded_blocks(checkpoint: Checkpoint, parallel: ParallelConfig) -> Iterator[tuple[int, Block]]:
    """The blocks of a model and its optimizer in another layout, each with its file."""
    entries = stored_entries(checkpoint.family, checkpoint.arch)
    states = _optimizer_states(checkpoint.files)
    for placed, files in _places(checkpoint, parallel):
        entry = entries[placed]
        for source_key, key in _keys(placed, entry, states, parallel.expert > 1):
            yield from _stored_blocks(checkpoint, placed, files, entry, source_key, key)


def _made_from(
    checkpoint: Checkpoint, command: str, shard_bytes: int, parallel: ParallelConfig | None = None
) -> dict[str, Any]:
    return {
        **({} if checkpoint.critic_config is None else {"critic": True}),
        "command": command,
        "source": fingerprint(checkpoint.path, checkpoint.source.weight_files()),
        "companions": fingerprint(checkpoint.companions),
        "shard_bytes": shard_bytes,
        "layout": parallel.model_dump() if parallel else None,
    }


def _split(items: Sequence[Item], nbytes: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Runs of items of at most `limit` bytes, or of one item if that is larger."""
    run: list[Item] = []
    size = 0
    for item in items:
        if run and size + nbytes(item) > limit:
            yield run
            run, size = [], 0
        run.append(item)
        size += nbytes(item)
    if run:
        yield run


def _places(checkpoint: Checkpoint, parallel: ParallelConfig) -> Iterator[tuple[PlacedTensor, Sequence[int]]]:
    """Every parameter, and the file of each of its tensor-parallel shards. Files are numbered by pipeline stage and
    tensor-parallel rank; files of expert-parallel parameters follow."""
    checkpoint.arch.check_layout(parallel)
    layout = ChunkLayout(checkpoint.family, checkpoint.arch, parallel)
    num_dense = parallel.pipeline * parallel.tensor
    for chunk in range(layout.num_chunks):
        stage = chunk % parallel.pipeline
        for placed in layout.tensors(chunk):
            if placed.expert is None or parallel.expert == 1:
                first, size = stage * parallel.tensor, parallel.tensor
            else:
                assert checkpoint.arch.experts
                expert_rank = placed.expert // (checkpoint.arch.experts.number // parallel.expert)
                size = parallel.expert_tensor
                first = num_dense + (stage * parallel.expert + expert_rank) * size
            yield placed, range(first, first + size)


def _hf_blocks(
    checkpoint: Checkpoint, placed: PlacedTensor, files: Sequence[int], entry: Entry
) -> Iterator[tuple[int, Block]]:
    arch, size = checkpoint.arch, len(files)
    dtype = checkpoint.source.spec(placed.hf[0]).dtype
    shape = _padded(placed, arch, size)
    for rank, file in enumerate(files):
        for part, (offsets, sizes) in enumerate(cuts(placed.layout, shape, arch, rank, size)):
            # Gate and up projections are stored one after the other, each sharded separately.
            names = (placed.hf[part],) if placed.layout is ShardRule.GATE_UP else placed.hf
            read = partial(_hf_shard, checkpoint.source, names, placed.layout, part, arch, rank, size)
            block = _stacked(entry, entry.key, shape, dtype, offsets, sizes, read, " / ".join(names))
            yield file, _as_stored(block, placed, arch)


def _hf_shard(
    source: TensorSource, names: Sequence[str], layout: ShardRule, part: int, arch: Architecture, rank: int, size: int
) -> Tensor:
    tensors: Sequence[Tensor] = [source.tensor(name) for name in names]
    if layout in DELTA:
        shard = take_shard(tensors, layout, arch, rank, size)
        return shard.split([rows // size for rows in delta_sections(len(shard) * size, arch)])[part]
    if layout in GATED and layout is not ShardRule.GATE_UP:
        tensors = [gate_and_up(tensors, layout)[part]]
    return take_shard(tensors, ShardRule.COLUMN if layout in GATED else layout, arch, rank, size)


def _stored_blocks(
    checkpoint: Checkpoint, placed: PlacedTensor, files: Sequence[int], entry: Entry, source_key: str, key: str
) -> Iterator[tuple[int, Block]]:
    stored, size = checkpoint.files, len(files)
    shape = _padded(placed, checkpoint.arch, size)
    dtype = stored.tensors[source_key].properties.dtype
    for rank, file in enumerate(files):
        for offsets, sizes in cuts(placed.layout, shape, checkpoint.arch, rank, size):
            read = partial(_stored_block, stored, source_key, entry, offsets, sizes)
            state = "" if source_key == entry.key else f" (optimizer, {source_key})"
            label = f"{' / '.join(placed.hf)}{state}"
            block = _stacked(entry, checkpoint.stored_key(key), shape, dtype, offsets, sizes, read, label)
            yield file, _as_stored(block, placed, checkpoint.arch)


def _stored_block(
    files: MegatronFiles, key: str, entry: Entry, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    """A block of the source; rows beyond the source's, from another padding of the vocabulary, are zeros."""
    rows = files.tensors[key].size[len(entry.stack)]
    present = (max(0, min(sizes[0], rows - offsets[0])), *sizes[1:])
    axes = [1] * len(entry.stack)
    block = files.read(key, (*entry.index, *offsets), (*axes, *present)).reshape(present)
    if present == sizes:
        return block
    return torch.cat([block, block.new_zeros(sizes[0] - present[0], *sizes[1:])])


def _as_stored(block: Block, placed: PlacedTensor, arch: Architecture) -> Block:
    """The block as one of the part that it belongs to, of parameters that are stored in parts."""
    if placed.layout not in DELTA:
        return block
    key, shape, first = delta_part(block.key, block.shape, block.offsets[0], arch)
    return replace(block, key=key, shape=shape, offsets=(block.offsets[0] - first, *block.offsets[1:]))


def _stacked(
    entry: Entry,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    read: Callable[[], Tensor],
    label: str,
) -> Block:
    ones = (1,) * len(entry.stack)
    return Block(key, (*entry.stack, *shape), dtype, (*entry.index, *offsets), (*ones, *sizes), read, label)


def _padded(placed: PlacedTensor, arch: Architecture, tensor_parallel: int) -> tuple[int, ...]:
    shape = stored_shape(placed, arch)
    return (arch.padded_vocab_size(tensor_parallel), *shape[1:]) if placed.layout is ShardRule.VOCAB else shape


def _megatron_outputs(
    checkpoint: Checkpoint, parts: Sequence[tuple[int, Block]], objects: Mapping[str, bytes], shard_bytes: int
) -> list[OutputFile]:
    """The files of blocks, and those of multi-token prediction."""
    by_file: dict[int, list[Block]] = {}
    for file, block in parts:
        by_file.setdefault(file, []).append(block)
    outputs: list[OutputFile] = []
    for file, blocks in sorted(by_file.items()):
        for part, run in enumerate(_split(blocks, lambda block: block.nbytes, shard_bytes)):
            here = {} if outputs else objects
            write = partial(write_blocks, run, here)
            outputs.append(OutputFile(f"__{file}_{part}.distcp", sum(block.nbytes for block in run), write))
    return outputs + _hf_outputs(checkpoint, checkpoint.mtp_names, shard_bytes, MTP_STEM)[0]


def _check_common_dtypes(checkpoint: Checkpoint, entries: Mapping[PlacedTensor, Entry]) -> None:
    """Raises InputError if q, k and v, or the same parameter of two layers, differ in dtype: Megatron stores them as
    one tensor."""
    dtypes: dict[str, torch.dtype] = {}
    for placed, entry in entries.items():
        for name in placed.hf:
            dtype = checkpoint.source.spec(name).dtype
            if dtypes.setdefault(entry.key, dtype) != dtype:
                raise InputError(
                    f"{checkpoint.path}: {name} is {dtype}, but Megatron stores it in one tensor with others that are "
                    f"{dtypes[entry.key]}; save the model in one dtype first"
                )


def _read_common(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of Megatron's common.pt. Raises InputError for a damaged file or training checkpoint."""
    damage = find_damage(checkpoint.path) if checkpoint.is_training else None
    if damage:
        raise InputError(
            f"{checkpoint.path} is damaged ({damage}); take another checkpoint of the run, or copy it again"
        )
    common = read_common(checkpoint.path)
    if checkpoint.is_training and "optimizer" not in common:
        file = checkpoint.path / COMMON_FILE
        raise InputError(f"{file} lacks the optimizer's settings; copy the checkpoint again, or take another")
    return common


def _optimizer_states(files: MegatronFiles) -> dict[str, dict[str, str]]:
    """{key of a parameter: {name of its optimizer state: key of that state}}."""
    states: dict[str, dict[str, str]] = {}
    for key in files.tensors:
        found = OPTIMIZER_KEY.fullmatch(key)
        if found:
            states.setdefault(found[2], {})[found[1]] = key
    return states


def _keys(
    placed: PlacedTensor, entry: Entry, states: Mapping[str, Mapping[str, str]], experts_apart: bool
) -> Iterator[tuple[str, str]]:
    """The stored tensors of one parameter, weights and optimizer state, as (key in the source, key in the target)."""
    yield entry.key, entry.key
    # Under expert parallelism Megatron has a second optimizer for experts after that of other parameters.
    chained = f"chained_{int(placed.expert is not None)}." if experts_apart else ""
    for name, key in states.get(entry.key, {}).items():
        yield key, f"{chained}optimizer.state.{name}.{entry.key}"


def _regrouped(optimizer: dict[Any, Any], experts_apart: bool, arch: Architecture) -> dict[Any, Any]:
    """Megatron's optimizer entries beside tensors, for one optimizer or with a second one for experts."""
    is_apart = 0 in optimizer
    if is_apart == experts_apart:
        return optimizer
    if is_apart:
        first: dict[Any, Any] = optimizer[0]
        return first
    groups = optimizer["optimizer"]["param_groups"]
    # Experts without biases have matrices only, so only the group with weight decay.
    chosen = [group for group in groups if arch.has_all_biases or group["wd_mult"] == 1.0]
    of_experts = [{**group, "is_expert_parallel": True} for group in chosen]
    return {0: optimizer, 1: {**optimizer, "optimizer": {**optimizer["optimizer"], "param_groups": of_experts}}}


def _copy_loop_state(source: Path, folder: Path, num_optimizers: int) -> None:
    for file in source.glob("loop.*"):
        shutil.copyfile(file, folder / file.name)
    state = read_json_object(source / _LOOP_FILE)
    counts = {"num_optimizers": num_optimizers}
    if (source / CRITIC_CONFIG_FILE).is_file():
        shutil.copyfile(source / CRITIC_CONFIG_FILE, folder / CRITIC_CONFIG_FILE)
        counts["num_critic_optimizers"] = num_optimizers
    replace_file(folder / _LOOP_FILE, json.dumps({**state, **counts}))


def require_format(checkpoint: Checkpoint, *, megatron: bool, command: str) -> None:
    """Raises InputError for a source of the other format, with the command to use."""
    if isinstance(checkpoint.source, HfCheckpoint) == megatron:
        found, wanted = ("Hugging Face", "Megatron") if megatron else ("Megatron", "Hugging Face")
        raise InputError(f"{checkpoint.path} is a {found} checkpoint; {command} needs a {wanted} one")
