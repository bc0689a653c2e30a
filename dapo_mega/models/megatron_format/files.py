"""Megatron's distributed checkpoint format (`torch_dist`), read and written without a Megatron model.

Every parameter is one global tensor, whatever the layout. Where all layers are alike they are stacked along a new
first axis, experts along the next one; gate and up projections follow each other; the vocabulary is padded to a
multiple of the tensor-parallel size. The layout only decides how tensors are cut into blocks, and in which files these
lie.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    Metadata,
    TensorStorageMetadata,
)

# Megatron's writer fills the same private record: torch has no public one.
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dapo_mega.atomic_files import check_regular, disk_refusal, read_json_object, replace_file
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture, ModelFamily, ShardRule, merge_shards, take_shard
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.hf_checkpoint import HfCheckpoint, TensorSource, TensorSpec, all_tensors, check_count
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.models.layouts import DELTA, GATED, ROWS, delta_sections
from dapo_mega.models.megatron_format.pickles import (
    COMMON_FILE,
    DAMAGED_PICKLE,
    METADATA_FILE,
    check_object,
    read_metadata,
    stored_bytes,
    stored_objects,
    unreadable,
)

Range = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block of a tensor."""

OPTIMIZER_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
"""The name of a piece of optimizer state, and the key of the parameter it belongs to."""

CRITIC_PREFIX = "critic."
"""What the names of a value model's tensors begin with that is stored beside a policy."""

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""Peft's configuration, which a checkpoint of adapters alone has beside them."""

_BLOCK_FILES = "*.distcp"
# Holds the number of rows that are not padding, which the stored shapes do not tell.
_VOCABULARY_FILE = "vocabulary.json"
_LAYER = re.compile(r"(?<=^decoder\.layers\.)(\d+)\.")
_FUSED_NORM = ".layer_norm_weight"
# Megatron-LM pads the vocabulary to a multiple of this times the tensor-parallel size.
_MEGATRON_LM_MULTIPLE = 128
# Megatron stores the parts of a gated delta layer's projection, and of its convolution, each on its own.
_DELTA_PARTS = ("query", "key", "value", "z", "beta", "alpha")
_DELTA_PART = re.compile(rf"(.+\.(?:in_proj|conv1d)\.weight)\.({'|'.join(_DELTA_PARTS)})")
_LINEAR_WEIGHT = re.compile(r".+\.(?:linear_\w+|in_proj|out_proj)\.weight")
# Queries, keys and values share one.
_MOST_TENSORS_OF_A_BLOCK = 3


@dataclass(frozen=True)
class Entry:
    """Where one parameter is stored: at `index` of the leading axes, of sizes `stack`, of the tensor `key`."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def stored_entries(family: ModelFamily, arch: Architecture) -> dict[PlacedTensor, Entry]:
    """The place of every parameter of the model, in checkpoint order."""
    tensors = list(all_tensors(family, arch))
    names = {name for placed in tensors for name in placed.megatron}
    stacked = _layers_are_alike(family, arch)
    return {placed: _entry(placed, names, arch, stacked) for placed in tensors}


def stored_shape(placed: PlacedTensor, arch: Architecture) -> tuple[int, ...]:
    """Shape of a parameter of one process that holds all of it, vocabulary not padded."""
    full = [torch.empty(hf_shape(name, arch), device="meta") for name in placed.hf]
    return tuple(take_shard(full, placed.layout, arch, 0, 1).shape)


def _layers_are_alike(family: ModelFamily, arch: Architecture) -> bool:
    def parameters(layer: int) -> set[str]:
        tensors = family.tensors(arch, range(layer, layer + 1), False, False)
        return {_LAYER.sub("", name) for placed in tensors for name in placed.megatron}

    if arch.gated_delta:
        return False
    return all(parameters(layer) == parameters(0) for layer in range(1, arch.num_layers))


def _entry(placed: PlacedTensor, names: set[str], arch: Architecture, stacked: bool) -> Entry:
    key = _key(placed, names)
    index, stack = [], []
    layer = _LAYER.search(key)
    if layer and stacked:
        key = _LAYER.sub("", key)
        index.append(int(layer[1]))
        stack.append(arch.num_layers)
    if placed.expert is not None:
        assert arch.experts
        key = key.replace(f".local_experts.{placed.expert}.", ".experts.")
        index.append(placed.expert)
        stack.append(arch.experts.number)
    return Entry(key, tuple(index), tuple(stack))


def _key(placed: PlacedTensor, names: set[str]) -> str:
    """Checkpoints of both kinds of layers name a norm by the linear layer that Transformer Engine fuses it into."""
    fused = next((name for name in placed.megatron if name.endswith(_FUSED_NORM)), None)
    if fused is not None and fused.replace(_FUSED_NORM, ".weight") in names:
        return fused
    return placed.megatron[0]


def cuts(layout: ShardRule, shape: Sequence[int], arch: Architecture, rank: int, size: int) -> list[Range]:
    """The blocks of a parameter of this shape that one of `size` tensor-parallel processes stores."""
    whole = (0,) * len(shape)
    if layout is ShardRule.REPLICATED:
        return [(whole, tuple(shape))] if rank == 0 else []
    axis = 1 if layout in ROWS else 0
    count = 2 if layout in GATED else 1
    sections = delta_sections(shape[0], arch) if layout in DELTA else [shape[axis] // count] * count
    blocks, first = [], 0
    for section in sections:
        span = section // size
        offsets = (*whole[:axis], first + rank * span, *whole[axis + 1 :])
        blocks.append((offsets, (*shape[:axis], span, *shape[axis + 1 :])))
        first += section
    return blocks


def delta_part(key: str, shape: Sequence[int], offset: int, arch: Architecture) -> tuple[str, tuple[int, ...], int]:
    """Of a DELTA parameter of this key and shape the part that has a row: its key, its shape, and its first row."""
    start = 0
    for name, rows in zip(_DELTA_PARTS, delta_sections(shape[0], arch), strict=False):
        if offset < start + rows:
            return f"{key}.{name}", (rows, *shape[1:]), start
        start += rows
    raise AssertionError(key)


class MegatronFiles:
    """The tensors and objects of one model in a folder of Megatron's format, read in blocks. Errors name the file or
    the tensor.

    With `is_critic` the model is the value model that is stored beside a policy; keys are without its prefix.
    """

    def __init__(self, path: Path, *, is_critic: bool = False) -> None:
        self.path = path
        self._is_critic = is_critic
        if (path / ADAPTER_CONFIG_FILE).exists():
            raise InputError(
                f"{path} holds LoRA adapters and not the model that they belong to; give the export of its run, the "
                f"folder hf, in which they are merged"
            )
        if not os.path.lexists(path / METADATA_FILE):
            raise InputError(
                f"{path} holds {_BLOCK_FILES} files but no {METADATA_FILE}, which is written last; copy or "
                f"save it again"
            )
        self._reader = FileSystemReader(path)
        self._metadata = read_metadata(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        stored = self._metadata.state_dict_metadata
        self.tensors = {
            key.removeprefix(self._prefix): item
            for key, item in stored.items()
            if isinstance(item, TensorStorageMetadata) and self._is_own(key)
        }
        self._parts = self._join_parts()
        self._intact: set[MetadataIndex] = set()
        self._check_files()

    def _join_parts(self) -> dict[str, dict[str, TensorStorageMetadata]]:
        """Makes the tensors that are stored in parts one each; returns the parts by their names."""
        found: dict[str, dict[str, TensorStorageMetadata]] = {}
        for key in [key for key in self.tensors if _DELTA_PART.fullmatch(key)]:
            whole, _, name = key.rpartition(".")
            found.setdefault(whole, {})[name] = self.tensors.pop(key)
        joined = {}
        for whole, by_name in found.items():
            joined[whole] = {f"{whole}.{name}": by_name[name] for name in _DELTA_PARTS if name in by_name}
            parts = list(joined[whole].values())
            size = torch.Size((sum(part.size[0] for part in parts), *parts[0].size[1:]))
            chunks = [chunk for part in parts for chunk in part.chunks]
            self.tensors[whole] = TensorStorageMetadata(parts[0].properties, size, chunks=chunks)
        return joined

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A block of the tensor `key`; reads only the stored blocks that overlap it."""
        if key not in self._parts:
            return self._read(key, self.tensors[key], offsets, sizes)
        blocks, start = [], 0
        for name, part in self._parts[key].items():
            first, last = max(offsets[0], start), min(offsets[0] + sizes[0], start + part.size[0])
            if first < last:
                blocks.append(self._read(name, part, (first - start, *offsets[1:]), (last - first, *sizes[1:])))
            start += part.size[0]
        return torch.cat(blocks)

    def _read(self, key: str, stored: TensorStorageMetadata, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        block = torch.empty(tuple(sizes), dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(self._prefix + key, stored, [wanted])
        if sum(item.lengths.numel() for item in items) != block.numel():
            raise InputError(f"{self.path} does not hold all of {key!r}; copy or save it again")
        for item in items:
            try:
                self._check_sums(item.storage_index)
                self._reader.read_data(LoadPlan([item]), _Into(block)).wait()
            except InputError:
                raise
            except (OSError, zipfile.BadZipFile, *DAMAGED_PICKLE) as error:
                file = self.path / self._location(item.storage_index).relative_path
                raise unreadable(f"{key!r} cannot be read from {file}", error) from error
        return block

    @property
    def _prefix(self) -> str:
        return CRITIC_PREFIX if self._is_critic else ""

    def _is_own(self, key: str) -> bool:
        return key.startswith(CRITIC_PREFIX) == self._is_critic

    @property
    def num_blocks(self) -> int:
        """Stored blocks of all tensors together."""
        return sum(len(tensor.chunks) for tensor in self.tensors.values())

    def block_files(self) -> set[str]:
        """The files of all tensors and objects that `.metadata` lists, relative to the folder."""
        return {place.relative_path for place in self._metadata.storage_data.values()}

    def read_objects(self) -> dict[str, bytes]:
        """The serialized bytes of the objects that are not tensors. Raises InputError for one that may run code."""
        objects = {}
        for key, what, read in stored_objects(self.path, self._metadata):
            if self._is_own(key):
                data = objects[key.removeprefix(self._prefix)] = read()
                check_object(key, data, what)
        return objects

    def _check_sums(self, index: MetadataIndex) -> None:
        """Raise BadZipFile if a stored block was changed: torch writes checksums and does not compare them."""
        if index in self._intact:
            return
        place = self._location(index)
        with zipfile.ZipFile(io.BytesIO(stored_bytes(self.path / place.relative_path, place))) as block:
            if block.testzip() is not None:
                raise zipfile.BadZipFile("its data does not fit its checksum")
        self._intact.add(index)

    def _location(self, index: MetadataIndex) -> _StorageInfo:
        place: _StorageInfo = self._reader.storage_data[index]
        return place

    def _check_files(self) -> None:
        """Raise InputError for a file that has not the bytes to hold its blocks."""
        sizes: dict[Path, int] = {}
        for place in self._reader.storage_data.values():
            file = self.path / place.relative_path
            sizes[file] = max(sizes.get(file, 0), place.offset + place.length)
        for file, expected in sizes.items():
            check_regular(file)
            size = file.stat().st_size
            if size < expected:
                raise InputError(f"{file} has {size} bytes instead of {expected}; copy or save it again")


class _Into(DefaultLoadPlanner):
    """Reads everything into one tensor."""

    def __init__(self, block: Tensor) -> None:
        super().__init__()
        self._block = block

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._block


class MegatronCheckpoint:
    """A model in Megatron's format as a source of tensors under their Hugging Face names; with `is_critic` the value
    model beside a policy."""

    def __init__(self, path: Path, family: ModelFamily, arch: Architecture, *, is_critic: bool = False) -> None:
        self.path = path
        self.files = MegatronFiles(path, is_critic=is_critic)
        self._arch = arch
        # Every layer and expert has blocks of its own.
        check_count(path, family, arch, _MOST_TENSORS_OF_A_BLOCK * self.files.num_blocks)
        entries = stored_entries(family, arch)
        self._known = {entry.key for entry in entries.values()}
        self._places = {name: (placed, entry) for placed, entry in entries.items() for name in placed.hf}
        # The file is the policy's.
        self._recorded_vocab_size = arch.vocab_size if is_critic else _recorded_vocab_size(path)
        if self._recorded_vocab_size is None:
            for placed, entry in entries.items():
                if placed.layout is ShardRule.VOCAB and entry.key in self.files.tensors:
                    self._check_padding(entry.key)
        # A parameter that is made of several tensors is asked for once per tensor.
        self._last: tuple[PlacedTensor | None, list[Tensor]] = (None, [])

    def names(self) -> set[str]:
        found = {name for name, (_, entry) in self._places.items() if entry.key in self.files.tensors}
        weights = {key for key in self.files.tensors if not OPTIMIZER_KEY.fullmatch(key)}
        return found | (weights - self._known)

    def weight_files(self) -> set[str]:
        return self.files.block_files()

    def spec(self, name: str) -> TensorSpec:
        placed, entry = self._places[name]
        stored = self.files.tensors[entry.key]
        shape = tuple(stored.size)
        if placed.layout is ShardRule.VOCAB:
            shape = (self._num_tokens(stored), *shape[1:])
        if shape == (*entry.stack, *stored_shape(placed, self._arch)):
            shape = hf_shape(name, self._arch)
        return TensorSpec(shape, stored.properties.dtype)

    def tensor(self, name: str) -> Tensor:
        if name not in self._places:
            raise InputError(f"{self.path} lacks the tensor {name!r}; is it a checkpoint of another model?")
        placed, entry = self._places[name]
        if self._last[0] != placed:
            axes = len(entry.stack)
            shape = self.files.tensors[entry.key].size[axes:]
            stored = self.files.read(entry.key, (*entry.index, *[0] * len(shape)), (*[1] * axes, *shape))
            self._last = (placed, merge_shards([stored.reshape(shape)], placed.layout, self._arch))
        return self._last[1][placed.hf.index(name)]

    def _num_tokens(self, stored: TensorStorageMetadata) -> int:
        """Rows of a tensor over the vocabulary that are not padding; all, where they do not fit the configuration."""
        if self._recorded_vocab_size is not None:
            return min(self._recorded_vocab_size, stored.size[0])
        return self._arch.vocab_size if _is_padded(stored, self._arch.vocab_size) else stored.size[0]

    def _check_padding(self, key: str) -> None:
        """Refuse rows beyond the vocabulary that were trained: the configuration's vocabulary is too small for them."""
        stored, vocab_size = self.files.tensors[key], self._arch.vocab_size
        rows, *others = stored.size
        if rows == vocab_size or not _is_padded(stored, vocab_size):
            return
        if self.files.read(key, (vocab_size, *[0] * len(others)), (rows - vocab_size, *others)).any():
            raise InputError(
                f"{self.path}: {key!r} has {rows} rows, and those beyond vocab_size={vocab_size} of config.json are "
                f"not zero as padding is; correct vocab_size, or if they are padding write "
                f'{{"vocab_size": {vocab_size}}} to {self.path / _VOCABULARY_FILE}'
            )


def _is_padded(stored: TensorStorageMetadata, vocab_size: int) -> bool:
    """Whether the rows of `stored` are the vocabulary, padded as its number of tensor-parallel blocks demands."""
    blocks = len({chunk.offsets[0] for chunk in stored.chunks})
    return stored.size[0] in {
        -(-vocab_size // multiple) * multiple for multiple in (blocks, blocks * _MEGATRON_LM_MULTIPLE)
    }


def _recorded_vocab_size(path: Path) -> int | None:
    """The `vocab_size` given to `write_metadata`; None in folders of other writers."""
    file = path / _VOCABULARY_FILE
    if not file.exists():
        return None
    size = read_json_object(file, "copy it again").get("vocab_size")
    if type(size) is not int or size < 1:
        raise InputError(f'{file} is not {{"vocab_size": ROWS}}; copy it again')
    return size


def is_megatron_folder(path: Path) -> bool:
    """Whether the folder has any file of Megatron's format, even an incomplete checkpoint."""
    return os.path.lexists(path / METADATA_FILE) or any(path.glob(_BLOCK_FILES))


def open_source(path: Path, family: ModelFamily, arch: Architecture) -> TensorSource:
    """The checkpoint in folder `path`, Hugging Face's or Megatron's."""
    if is_megatron_folder(path):
        return MegatronCheckpoint(path, family, arch)
    return HfCheckpoint(path)


@dataclass(frozen=True)
class Block:
    """A part of the global tensor `key` of shape `shape`, to be read when it is written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]
    label: str = ""
    """What to call it in a message."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def write_blocks(
    blocks: Iterable[Block], objects: Mapping[str, bytes], file: Path, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Write one file, a block at a time; returns what `write_metadata` must know of it, as JSON values.

    Raises InputError naming the file where the disk is full or fails.
    """
    try:
        with file.open("wb") as stream:
            records = [*_write_objects(stream, objects), *_write_tensors(stream, blocks, advance)]
            stream.flush()
            os.fsync(stream.fileno())
    except (OSError, RuntimeError) as error:
        reason = disk_refusal(error)
        if reason is None:
            raise
        raise InputError(f"cannot write {file} ({reason}); free space and start again") from error
    return records


def _write_objects(stream: IO[bytes], objects: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    for key, data in objects.items():
        yield {"key": key, "start": stream.tell(), "length": len(data)}
        stream.write(data)


def _write_tensors(
    stream: IO[bytes], blocks: Iterable[Block], advance: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    for block in blocks:
        start = stream.tell()
        tensor = owned(block.read().reshape(block.sizes))
        torch.save(tensor, stream)
        yield {
            "not_finite": not is_finite(tensor),
            "label": block.label,
            "key": block.key,
            "shape": block.shape,
            "dtype": str(block.dtype).removeprefix("torch."),
            "offsets": block.offsets,
            "sizes": block.sizes,
            "start": start,
            "length": stream.tell() - start,
        }
        advance(block.nbytes)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. Takes no memory besides the tensor."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.numel() == 0:
        return True
    # The least and the largest value are NaN where any value is.
    return all(math.isfinite(value) for value in torch.stack(torch.aminmax(tensor)).tolist())


def owned(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous storage that holds nothing else."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_vocabulary(folder: Path, vocab_size: int) -> None:
    """Record how many rows of the vocabulary's tensors in `folder` are not padding."""
    replace_file(folder / _VOCABULARY_FILE, json.dumps({"vocab_size": vocab_size}))


def write_metadata(
    folder: Path, records: Mapping[str, list[dict[str, Any]]], common: Mapping[str, Any], vocab_size: int
) -> None:
    """Make a checkpoint of files, given with their records; `common` is what Megatron keeps beside tensors.

    `vocab_size` counts the rows that are not padding; reading compares it with config.json.
    """
    stored: dict[str, Any] = {}
    places = {}
    for file, items in records.items():
        for item in items:
            index = MetadataIndex(item["key"], item.get("offsets"))
            places[index] = _StorageInfo(file, item["start"], item["length"])
            if "shape" not in item:
                stored[item["key"]] = BytesStorageMetadata()
                continue
            properties = TensorProperties(dtype=getattr(torch, item["dtype"]))
            tensor = stored.setdefault(
                item["key"], TensorStorageMetadata(properties, torch.Size(item["shape"]), chunks=[])
            )
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(item["offsets"]), torch.Size(item["sizes"])))
    metadata = Metadata(stored, storage_data=places, version=CURRENT_DCP_VERSION)
    buffer = io.BytesIO()
    torch.save(dict(common), buffer)
    replace_file(folder / COMMON_FILE, buffer.getvalue())
    write_vocabulary(folder, vocab_size)
    replace_file(folder / METADATA_FILE, pickle.dumps(metadata))
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in backends}
    replace_file(folder / "metadata.json", json.dumps({**backends, **versions}))


def no_extra_state(entries: Mapping[PlacedTensor, Entry]) -> dict[str, bytes]:
    """The empty `_extra_state` objects that Megatron's linear layers expect beside their weights."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    keys = set()
    for entry in entries.values():
        if _LINEAR_WEIGHT.fullmatch(entry.key):
            index, stack = entry.index or (0,), entry.stack or (1,)
            shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, stack))}"
            keys.add(f"{entry.key.removesuffix('weight')}_extra_state/{shard}")
    return dict.fromkeys(sorted(keys), buffer.getvalue())
